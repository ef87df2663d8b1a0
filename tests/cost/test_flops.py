import copy
import time

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from fxpipe import compat
from fxpipe.cost.device import CPU, H100, Device
from fxpipe.cost.flops import annotate_costs, node_costs
from fxpipe.errors import CostError
from fxpipe.ir.annotations import cost_of, set_mutates

FLOAT = 4


class Leaves(fx.Tracer):
    """Takes the modules of this file's `Leaf` classes as leaves."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Leaf) or super().is_leaf_module(m, module_qualified_name)


class Leaf(nn.Module):
    pass


def traced(model: nn.Module, *args: Tensor) -> fx.GraphModule:
    gm = fx.GraphModule(model, Leaves().trace(model))
    FakeTensorProp(gm, compat.fake_mode()).propagate(*args)
    return gm


def test_a_linear_layer_costs_its_product_and_its_bytes():
    cost = node_costs(traced(nn.Sequential(nn.Linear(16, 32)), torch.randn(8, 16)))["_0"]
    assert cost.flops == 2 * 8 * 16 * 32
    assert cost.parameter_bytes == (16 * 32 + 32) * FLOAT
    assert cost.output_bytes == 8 * 32 * FLOAT
    assert cost.moved_bytes == 8 * 16 * FLOAT + cost.parameter_bytes + cost.output_bytes
    assert cost.trainable


def test_a_node_takes_the_larger_of_arithmetic_and_memory():
    gm = traced(nn.Sequential(nn.Linear(16, 32)), torch.randn(8, 16))
    flops = node_costs(gm, Device(flops_per_s=1e3, bytes_per_s=1e99))["_0"]
    assert flops.forward_s == flops.flops / 1e3
    memory = node_costs(gm, Device(flops_per_s=1e99, bytes_per_s=1e3))["_0"]
    assert memory.forward_s == memory.moved_bytes / 1e3
    assert memory.backward_s == 2 * memory.forward_s


def test_a_backward_multiplies_once_for_each_gradient_that_is_wanted():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    model[3].requires_grad_(False)
    table = node_costs(traced(model, torch.randn(4, 8)), Device(1.0, 1e99))
    ratios = [cost.backward_s / cost.forward_s for name, cost in table.items() if cost.flops]
    assert ratios == [0, 1, 2, 1]  # nothing, weight only, both, input only
    assert [cost.trainable for cost in table.values() if cost.flops] == [False, True, True, True]


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("mask", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight) * self.mask
        return y.reshape(2, -1).transpose(0, 1) @ y[:, :4].detach().sum(1, keepdim=True)[:2]


def test_parameters_count_where_they_are_read_and_views_move_nothing():
    table = node_costs(traced(Functional(), torch.randn(4, 8)))
    assert table["linear"].parameter_bytes == 8 * 8 * FLOAT
    assert table["mul"].parameter_bytes == 0
    for view in ("reshape", "transpose", "getitem", "detach"):
        assert table[view].moved_bytes == 0, view
    assert table["reshape"].trainable
    assert not table["detach"].trainable
    assert not table["sum_1"].trainable
    assert table["matmul"].trainable


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


def test_attention_on_the_cpu_is_counted():
    q = torch.randn(2, 4, 16, 8)
    cost = node_costs(traced(Attention(), q, q, q))["scaled_dot_product_attention"]
    assert cost.flops == 2 * (2 * 2 * 4 * 16 * 16 * 8)


class Experts(nn.Module):
    def forward(self, x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        return F.grouped_mm(x, weights, offs=ends)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_counted_in_every_dtype(dtype: torch.dtype):
    gm = fx.symbolic_trace(Experts())
    with compat.fake_mode():
        x, weights, ends, product, _ = gm.graph.nodes
        x.meta["val"] = torch.empty(32, 16, dtype=dtype)
        weights.meta["val"] = torch.empty(4, 16, 24, dtype=dtype)
        ends.meta["val"] = torch.empty(4, dtype=torch.int32)
        product.meta["val"] = torch.empty(32, 24, dtype=dtype)
    assert node_costs(gm)[product.name].flops == 2 * 32 * 16 * 24


def test_a_recurrent_layer_is_counted():
    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(8, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x)[0]

    cost = node_costs(traced(First(), torch.randn(5, 3, 8)))["lstm"]
    assert cost.flops == 5 * 3 * 2 * (8 * 4 * 16 + 16 * 4 * 16)


def test_an_embedding_reads_rows_and_has_a_gradient_of_the_whole_table():
    model = nn.Sequential(nn.Embedding(1000, 8))
    cost = node_costs(traced(model, torch.zeros(2, 3, dtype=torch.long)), Device(1.0, 1.0))["_0"]
    assert cost.moved_bytes == 2 * 3 * (8 + 2 * 8 * FLOAT)
    assert cost.backward_s > 1000 * 8 * FLOAT


class Forgetful(Leaf):
    """Keeps what it computes, counts its calls, draws random numbers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.seen = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = F.dropout(self.norm(x) + torch.arange(4), 0.5)
        return self.seen


def test_nothing_is_changed_and_nothing_is_drawn():
    gm = traced(nn.Sequential(Forgetful()), torch.randn(8, 4))
    gm.get_submodule("0").seen = None
    state = copy.deepcopy(gm.state_dict())
    random = torch.get_rng_state()
    cost = node_costs(gm)["_0"]
    assert cost.parameter_bytes == 2 * 4 * FLOAT
    assert all(torch.equal(state[name], value) for name, value in gm.state_dict().items())
    assert gm.get_submodule("0").seen is None
    assert gm.get_submodule("0").norm.training
    assert torch.equal(random, torch.get_rng_state())
    assert torch.is_grad_enabled()


class Overwrite(Leaf):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x.copy_(self.fc(x))


def test_a_write_in_place_moves_bytes_and_is_counted():
    gm = traced(
        nn.Sequential(nn.Linear(8, 8), Overwrite(), nn.ReLU(inplace=True)), torch.randn(4, 8)
    )
    for node in gm.graph.nodes:
        if node.name in ("_1", "_2"):
            set_mutates(node, (node.args[0].name,))
    table = node_costs(gm)
    assert table["_1"].flops == 2 * 4 * 8 * 8
    assert table["_2"].moved_bytes == 2 * 4 * 8 * FLOAT
    assert table["_2"].trainable


def call(graph: fx.Graph, target, *args: object) -> fx.Node:
    return graph.call_function(target, args)


def test_regions_are_honoured_and_closed():
    graph = fx.Graph()
    x = graph.placeholder("x")
    region = call(graph, compat.enter_autocast, "cpu", torch.bfloat16, True, True)
    low = call(graph, torch.matmul, x, x)
    mixed = call(graph, torch.matmul, low, x)  # bf16 times f32: only autocast takes it
    call(graph, compat.exit_autocast, region)
    call(graph, compat.set_grad_enabled, False)
    still = call(graph, torch.matmul, x, x)
    call(graph, compat.set_grad_enabled, True)
    moving = call(graph, torch.matmul, x, x)
    call(graph, compat.set_grad_enabled, False)
    graph.output((mixed, still, moving))
    with compat.fake_mode():
        value = torch.empty(8, 8)
        x.meta["val"] = value.clone().requires_grad_()
        low.meta["val"] = mixed.meta["val"] = value.bfloat16()
        still.meta["val"] = moving.meta["val"] = value
    table = node_costs(fx.GraphModule(nn.Module(), graph))
    assert table[mixed.name].flops == 2 * 8**3
    assert table[mixed.name].trainable
    assert not table[still.name].trainable
    assert table[moving.name].trainable
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


class Picky(Leaf):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) if x.sum() > 0 else x


def test_a_node_that_needs_data_costs_its_bytes():
    gm = fx.GraphModule(nn.Sequential(Picky()), Leaves().trace(nn.Sequential(Picky())))
    with compat.fake_mode():
        for node in gm.graph.nodes:
            node.meta["val"] = torch.empty(4, 8)
    cost = node_costs(gm)["_0"]
    assert cost.flops == 0
    assert cost.moved_bytes == (2 * 4 * 8 + 8 * 8 + 8) * FLOAT
    assert cost.trainable


def test_layers_of_one_class_and_shape_may_differ_in_their_options():
    model = nn.Sequential(
        nn.Conv1d(8, 8, 3, padding=1),
        nn.Conv1d(8, 8, 3, padding=2, dilation=2),
        nn.Conv1d(8, 8, 3, padding=1, groups=4),
    )
    table = node_costs(traced(model, torch.randn(1, 8, 20)))
    assert [c.flops for c in table.values() if c.flops] == [7680, 7680, 7680 // 4]


def test_the_device_of_the_values_decides_where_none_is_given():
    graph = fx.Graph()
    graph.output(call(graph, torch.relu, graph.placeholder("x")))
    gm = fx.GraphModule(nn.Module(), graph)
    for kind, device in (("cpu", CPU), ("cuda", H100)):
        with compat.fake_mode():
            for node in gm.graph.nodes:
                node.meta["val"] = torch.empty(4, device=kind)
        assert node_costs(gm)["relu"].forward_s == 2 * 4 * FLOAT / device.bytes_per_s


def test_costs_are_written_where_passes_read_them():
    gm = traced(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4))
    table = annotate_costs(gm)
    assert {node.name: cost_of(node) for node in gm.graph.nodes} == dict(table)


def test_a_graph_of_real_values_is_refused():
    gm = fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4)))
    for node in gm.graph.nodes:
        node.meta["val"] = torch.zeros(2, 4)
    with pytest.raises(CostError, match="the values of the graph are real"):
        node_costs(gm)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.qkv = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x))
        q, k, v = (qkv[:, None, :, i : i + 32] for i in (0, 32, 64))
        return x + F.gelu(self.out(F.scaled_dot_product_attention(q, k, v)[:, 0]))


def test_a_deep_model_takes_less_than_two_milliseconds_a_node():
    gm = traced(nn.Sequential(*(Block() for _ in range(24))), torch.randn(2, 16, 32))
    began = time.process_time()
    table = node_costs(gm)
    assert time.process_time() - began < 2e-3 * len(table)
    layer = 2 * 2 * 16 * 32 * (4 * 32) + 2 * (2 * 2 * 16 * 16 * 32)
    assert table.total().flops == 24 * layer

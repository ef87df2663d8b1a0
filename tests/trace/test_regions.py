"""What plain fx loses without a word: regions, custom functions, factories, type checks."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from fxpipe.errors import TraceError
from fxpipe.ir.annotations import checkpoint_region_of
from fxpipe.trace import trace
from tests.trace.models import assert_same


class Lin(nn.Module):
    def __init__(self, function: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.lin, x)


class Triple(torch.autograd.Function):
    """Its backward is not the derivative of its forward, so that a lost one shows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 7


X = torch.randn(3, 4)


def graph_of(model: nn.Module) -> fx.Graph:
    return trace(model, (X,), {}).module.graph


def with_autocast(lin: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = lin(x)
    return y.float() + lin(x)


def with_no_grad(lin: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = lin(x)
    return y * lin(x)


def with_function(lin: nn.Module, x: Tensor) -> Tensor:
    return Triple.apply(lin(x)) + 1


def with_checkpoint(lin: nn.Module, x: Tensor) -> Tensor:
    y = checkpoint(lambda z: lin(z).relu(), x, use_reentrant=False)
    return checkpoint(lin, y, use_reentrant=False) + y


def with_reentrant_checkpoint(lin: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(lin, lin(x), use_reentrant=True).relu()


@pytest.mark.parametrize("function", [with_autocast, with_no_grad, with_function, with_checkpoint])
def test_a_region_keeps_its_meaning(function: Callable[[nn.Module, Tensor], Tensor]) -> None:
    model = Lin(function)
    assert_same(trace(model, (X,), {}), model, (torch.randn(5, 4),))


def test_an_autocast_block_stands_between_two_nodes() -> None:
    names = [node.name for node in graph_of(Lin(with_autocast)).nodes]
    assert names[1:4] == ["_enter_autocast", "lin", "_exit_autocast"]


def test_a_grad_mode_block_stands_between_two_nodes() -> None:
    nodes = list(graph_of(Lin(with_no_grad)).nodes)
    assert [node.name for node in nodes[1:4]] == ["_set_grad_enabled", "lin", "_set_grad_enabled_1"]
    assert (nodes[1].args, nodes[3].args) == ((False,), (True,))


def test_a_custom_function_is_one_node_that_leads_back_to_its_class() -> None:
    (node,) = (n for n in graph_of(Lin(with_function)).nodes if n.name == "triple")
    assert node.target.__self__ is Triple
    assert pickle.loads(pickle.dumps(node.target))(X).equal(X * 3)


def test_the_nodes_of_each_checkpoint_carry_its_number() -> None:
    regions = {n.name: checkpoint_region_of(n) for n in graph_of(Lin(with_checkpoint)).nodes}
    assert regions == {"x": None, "lin": 0, "relu": 0, "lin_1": 1, "add": None, "output": None}
    reentrant = graph_of(Lin(with_reentrant_checkpoint)).nodes
    assert [checkpoint_region_of(n) for n in reentrant] == [None, None, 0, None, None]


def in_inference_mode(lin: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode():
        return lin(x)


def with_a_seed(lin: nn.Module, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return lin(x)


def with_forked_random_state(lin: nn.Module, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return lin(x)


def with_one_attention_kernel(lin: nn.Module, x: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return lin(x)


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (in_inference_mode, "opens torch.inference_mode"),
        (with_a_seed, "seeds the random numbers"),
        (with_forked_random_state, "forks the state of the random numbers"),
        (with_one_attention_kernel, "chooses attention kernels"),
    ],
)
def test_a_region_that_no_node_stands_for_is_refused(
    function: Callable[[nn.Module, Tensor], Tensor], problem: str
) -> None:
    with pytest.raises(TraceError, match=problem) as caught:
        graph_of(Lin(function))
    assert function.__name__ in caught.value.at


def test_random_factories_draw_anew_at_every_run() -> None:
    module = trace(Lin(lambda lin, x: x + torch.rand(4)), (X,), {}).module
    assert not torch.equal(module(X)[0], module(X)[0])


def test_factories_take_the_sizes_of_the_batch_at_hand() -> None:
    model = Lin(
        lambda lin, x: lin(x) + torch.arange(x.shape[0]).view(-1, 1) * torch.ones(x.size(0), 1)
    )
    assert_same(trace(model, (X,), {}), model, (torch.randn(5, 4),))


def test_a_branch_on_what_sizes_alone_decide_is_taken_as_in_eager_code() -> None:
    def packed(lin: nn.Module, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1])
        return lin(x) if (positions.diff() == 1).all() else x

    traced = trace(Lin(packed), (X,), {})
    assert "lin" in [node.name for node in traced.module.graph.nodes]
    assert [guard.value for guard in traced.guards] == [True]


def test_type_checks_see_the_value_behind_a_proxy() -> None:
    def checks(lin: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(x, Tensor)
        assert isinstance(x.shape[0], int)
        assert isinstance(x.shape, tuple)
        assert not isinstance(x, nn.Parameter)
        assert isinstance(lin.weight, nn.Parameter)
        assert torch.is_tensor(x)
        assert type(x) is Tensor
        assert type(x.shape[0]) is int
        assert isinstance(Lin, (type, str))
        return lin(x)

    assert len(graph_of(Lin(checks)).nodes) == 3
    assert "isinstance" not in globals()


def test_containers_come_back_as_real_containers() -> None:
    def unpack(lin: nn.Module, x: Tensor) -> Any:
        values, _ = torch.max(x, 1)
        first, *rest = x.split(1, dim=1)
        return {"v": values, "s": torch.sort(x), "f": first, "n": len(rest)}

    model = Lin(unpack)
    traced = trace(model, (X,), {})
    names = [node.name for node in traced.module.graph.nodes]
    assert names[1:3] == ["max_1", "getitem"]  # and not the indices, which nobody reads
    assert_same(traced, model, (torch.randn(5, 4),))

"""Where fx cannot trace a model, torch.export captures it: same names, same numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe.errors import TraceError
from fxpipe.ir.annotations import (
    checkpoint_region_of,
    is_random,
    module_path_of,
    mutates_of,
    result_is_of,
    source_of,
    updates_buffers,
    value_of,
)
from fxpipe.trace import Traced, trace
from fxpipe.trace.exported import trace_by_export
from fxpipe.trace.symbolic import trace_symbolically
from tests.trace.models import GPT, assert_same

X = torch.randn(3, 4)


def exported(model: nn.Module, *args: Any, **kwargs: Any) -> Traced:
    traced = trace_by_export(model, args, kwargs, ())
    traced.module.graph.lint()
    return traced


class Calls(nn.Module):
    """``function(layer, x)``"""

    def __init__(self, function: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.function(self.lin, x)


def no_proxies(lin: nn.Module, x: Tensor) -> Tensor:
    """A method looked up on the class takes tensors alone, which a proxy is not."""
    return Tensor.relu(lin(x))


def node_of(traced: Traced, name: str) -> Any:
    return next(n for n in traced.module.graph.nodes if n.name == name)


# ---------------------------------------------------------------------------------------------
# The chain


def test_a_model_that_fx_cannot_trace_is_exported_and_the_graph_says_why() -> None:
    model = Calls(no_proxies)
    traced = trace(model, (X,), {})
    assert traced.front_end == "export"
    assert traced.why.startswith("fx: Calls failed while it was traced: TypeError: descriptor")
    assert_same(traced, model, (X,))
    assert trace(nn.Linear(4, 4), (X,), {}).why == ""


def test_where_both_fail_the_error_is_that_of_fx_and_tells_of_the_other() -> None:
    model = Calls(lambda lin, x: lin(x) if x.sum() > 0 else x)
    with pytest.raises(TraceError, match="branches on the value of a tensor") as caught:
        trace(model, (X,), {})
    assert "torch.export cannot take it either: Calls failed" in caught.value.hint
    assert "GuardOnDataDependentSymNode" in caught.value.hint


def test_export_opens_leaf_modules_and_so_does_not_stand_in_for_a_trace_with_them() -> None:
    with pytest.raises(TraceError, match="TypeError") as caught:
        trace(Calls(no_proxies), (X,), {}, leaf_modules=["lin"])
    assert "as leaf_modules asks for" in caught.value.hint


def test_a_pipeline_of_an_exported_model_gives_the_numbers_of_the_model() -> None:
    model = nn.Sequential(*(Calls(no_proxies) for _ in range(4)))
    pipe = fxpipe.compile(
        model, 2, loss=F.mse_loss, cuts=["2"], example_inputs=((torch.randn(8, 4),), {})
    )
    assert "traced by export (fx: Calls (0) failed" in pipe.report()
    assert next(n for n, _ in pipe.graph(1).named_parameters()) == "2.lin.weight"
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    result = fxpipe.verify(model, (x,), target=y, stages=2, loss=F.mse_loss)
    assert all(row.equal for row in result.rows)


# ---------------------------------------------------------------------------------------------
# The same numbers, under the same names


def test_a_decoder_gives_the_same_numbers_for_another_batch_and_sequence_length() -> None:
    torch.manual_seed(0)
    model = GPT()  # with dropout, and a tied head
    traced = exported(model, torch.randint(31, (2, 8)))
    assert_same(traced, model, (torch.randint(31, (2, 8)),))
    assert_same(traced, model, (torch.randint(31, (3, 13)),))


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_keeps_its_mode_and_its_updates(training: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
    traced = exported(model.train(training), torch.randn(2, 3, 8, 8))
    assert_same(traced, model, (torch.randn(3, 3, 10, 8),))
    assert updates_buffers(node_of(traced, "batch_norm")) == training


def test_parameters_and_buffers_are_the_models_own_under_their_first_names() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.randn(4))
            self.model = nn.Linear(4, 4)  # the name that the module has in what is exported
            self.model.bias = self.bias
            self.register_buffer("scale", torch.ones(4), persistent=False)
            self.plain = torch.full((4,), 2.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x) * self.scale + self.plain + torch.tensor([1.0, 2.0, 3.0, 4.0])

    model = Tied()
    traced = exported(model, X)
    assert_same(traced, model, (X,))
    assert [n for n, _ in traced.module.named_parameters()] == ["bias", "model.weight"]
    for name, parameter in traced.module.named_parameters():
        assert parameter is model.get_parameter(name)
    assert traced.module.scale is model.scale
    assert traced.module.plain is model.plain
    assert "scale" not in traced.module.state_dict()


def test_a_model_on_meta_is_traced_for_the_device_of_its_inputs() -> None:
    tokens = torch.randint(31, (2, 8))
    with torch.device("meta"):
        model = GPT(layers=1)
    traced = exported(model, tokens)
    assert all(p.is_meta for p in traced.module.parameters())
    assert str(traced.module.graph) == str(exported(GPT(layers=1), tokens).module.graph)


@dataclasses.dataclass
class Result:
    value: Tensor
    rows: int
    nothing: None = None
    more: Any = None


def test_the_result_has_the_models_own_structure() -> None:
    def structured(lin: nn.Module, x: Tensor) -> Result:
        return Result(lin(x), x.shape[0], more={"b": [x, "text"], "a": (1.5, x.shape)})

    model = Calls(structured)
    with pytest.raises(TraceError, match=r"returns a torch\.Size"):
        exported(model, X)
    model = Calls(lambda lin, x: dataclasses.replace(structured(lin, x), more={"b": [x, 2]}))
    traced = exported(model, X)
    assert_same(traced, model, (torch.randn(5, 4),))


class Bag:
    def __init__(self, x: Tensor) -> None:
        self.x = x


@pytest.fixture
def registered() -> Iterator[None]:
    torch.utils._pytree.register_pytree_node(Bag, lambda b: ([b.x], None), lambda c, _: Bag(*c))
    yield
    del torch.utils._pytree.SUPPORTED_NODES[Bag]


@pytest.mark.parametrize("capture", [exported, lambda model, x: trace(model, (x,), {})])
@pytest.mark.usefixtures("registered")
def test_a_class_that_is_registered_with_pytree_may_be_returned(capture: Any) -> None:
    model = Calls(lambda lin, x: Bag(lin(x)))
    traced = capture(model, X)
    result = traced.output.unflatten(traced.module(X))
    assert isinstance(result, Bag)
    assert torch.equal(result.x, model.lin(X))


# ---------------------------------------------------------------------------------------------
# What the nodes know


def test_nodes_know_what_those_of_fx_know() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.5)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([Inner(), nn.Linear(4, 4)])
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.parts[1](self.parts[0](x)).mul_(2)

    traced = exported(Outer(), X)
    dropout, linear = node_of(traced, "dropout"), node_of(traced, "linear")
    line = Inner.forward.__code__.co_firstlineno + 1
    assert source_of(dropout) == f"test_exported.py:{line} in forward"
    assert module_path_of(dropout) == (("", "Outer"), ("parts.0", "Inner"))
    assert module_path_of(linear)[-1] == ("parts.1", "Linear")
    assert is_random(dropout)
    assert not is_random(linear)
    assert not value_of(dropout).requires_grad
    assert value_of(linear).requires_grad
    assert mutates_of(node_of(traced, "mul_")) == ("linear",)
    assert result_is_of(node_of(traced, "mul_")) == "linear"
    assert updates_buffers(node_of(traced, "add_"))


def with_autocast(lin: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = lin(x)
        with torch.autocast("cpu", enabled=False):
            z = lin(y.float())
    return z + y


def without_gradients(lin: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = lin(x)
        with torch.enable_grad():
            z = lin(y)
    return z * y + lin(x)


def with_checkpoints(lin: nn.Module, x: Tensor) -> Tensor:
    y = checkpoint(lambda z: lin(z).relu(), x, use_reentrant=False)
    return checkpoint(torch.sigmoid, y, use_reentrant=False) + y


def with_a_reentrant_checkpoint(lin: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(lin, lin(x), use_reentrant=True).relu()


@pytest.mark.parametrize(
    ("function", "regions"),
    [
        (with_autocast, [None] * 4),
        (without_gradients, [None] * 4),
        (with_checkpoints, [0, 0, 1, None]),
        (with_a_reentrant_checkpoint, [None, 0, None]),
    ],
)
def test_a_region_keeps_its_meaning(function: Any, regions: list[int | None]) -> None:
    model = Calls(function)
    traced = exported(model, X)
    assert_same(traced, model, (torch.randn(5, 4),))
    made = [n for n in traced.module.graph.nodes if isinstance(value_of(n), Tensor) and n.args]
    assert [checkpoint_region_of(n) for n in made][: len(regions)] == regions


def test_the_callers_own_autocast_is_seen_by_the_model_and_not_held_by_the_graph() -> None:
    def asks(lin: nn.Module, x: Tensor) -> Tensor:
        y = lin(x)
        return y * 2 if y.dtype == torch.bfloat16 else y

    model = Calls(asks)
    with torch.autocast("cpu", torch.bfloat16):
        traced = exported(model, X)
        assert torch.equal(traced.module(X)[0], model(X))
    assert traced.module(X)[0].dtype == torch.float32


def test_the_model_takes_the_ways_it_takes_in_eager_code() -> None:
    def asks(lin: nn.Module, x: Tensor) -> Tensor:
        assert not torch.compiler.is_exporting()
        assert isinstance(x.shape[0], int)
        assert type(x) is Tensor
        return lin(x)

    model = Calls(asks)
    traced = exported(model, X)
    assert traced.why == ""  # the first export, with sizes left open, took it
    assert_same(traced, model, (torch.randn(5, 4),))


# ---------------------------------------------------------------------------------------------
# State


class Updates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("a", torch.zeros(4))
        self.register_buffer("b", torch.ones(4))
        self.plain = torch.zeros(4)
        self.label = "before"

    def forward(self, x: Tensor) -> Tensor:
        old = self.mean
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.a, self.b = self.b, self.a
        self.plain.add_(1)
        self.label = "after"
        return x * old + self.mean * self.a


def test_what_is_assigned_to_a_buffer_of_a_submodule_is_written() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Updates())
    traced = exported(model, X)
    assert_same(traced, model, (torch.randn(5, 4),))


def test_an_export_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), Updates())
    tensors = {name: id(value) for name, value in model.state_dict(keep_vars=True).items()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    exported(model, X)
    assert {n: id(v) for n, v in model.state_dict(keep_vars=True).items()} == tensors
    assert all(torch.equal(state[n], v) for n, v in model.state_dict().items())
    assert model[1].label == "before"
    assert float(model[1].plain.sum()) == 0
    assert not isinstance(model[1].plain, nn.Parameter)


def test_a_hook_that_is_added_at_the_first_call_is_gone_after_a_trace_that_fails() -> None:
    def hooked(lin: nn.Module, x: Tensor) -> Tensor:
        lin.register_forward_hook(lambda module, args, output: output * 2)
        return no_proxies(lin, x)

    model = Calls(hooked)
    traced = trace(model, (X,), {})
    assert not model.lin._forward_hooks
    assert torch.equal(traced.module(X)[0], model(X))


# ---------------------------------------------------------------------------------------------
# What would be lost


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 5


STRAY = nn.Parameter(torch.ones(4))


def assigns_data(lin: nn.Module, x: Tensor) -> Tensor:
    y = lin(x)
    y.data = y * 2
    return y


def hooks_a_tensor(lin: nn.Module, x: Tensor) -> Tensor:
    y = lin(x)
    y.register_hook(lambda gradient: gradient * 2)
    return y


def keeps_a_tensor(lin: nn.Module, x: Tensor) -> Tensor:
    lin.last = lin(x)
    return lin.last


def in_inference_mode(lin: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode():
        return lin(x)


def seeded(lin: nn.Module, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return lin(x)


def from_a_generator(lin: nn.Module, x: Tensor) -> Tensor:
    return lin(x) + torch.rand(4, generator=torch.Generator())


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda lin, x: Triple.apply(lin(x)), "autograd.Function Triple, whose backward"),
        (lambda lin, x: lin(x) * STRAY, "reads a parameter that is not registered"),
        (assigns_data, r"assigns \.data"),
        (hooks_a_tensor, "registers a hook on a tensor"),
        (keeps_a_tensor, r"keeps a tensor in its attribute 'lin\.last'"),
        (in_inference_mode, r"opens torch\.inference_mode"),
        (seeded, "seeds the random numbers"),
        (from_a_generator, "a generator of its own"),
    ],
    ids=["function", "parameter", "data", "hook", "attribute", "inference", "seed", "generator"],
)
def test_what_export_would_lose_is_refused_by_name(function: Any, problem: str) -> None:
    with pytest.raises(TraceError, match=problem):
        exported(Calls(function), X)


def test_a_function_whose_backward_nobody_needs_may_be_called() -> None:
    def frozen(lin: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = Triple.apply(x)
        return lin(y)

    model = Calls(frozen)
    assert_same(exported(model, X), model, (X,))


def test_a_check_of_data_does_not_hinder_and_is_not_made() -> None:
    def checks(lin: nn.Module, x: Tensor) -> Tensor:
        torch._check_tensor_all(x.isfinite())
        return lin(x)

    with pytest.raises(TraceError, match="needs the values of a tensor"):
        trace_symbolically(Calls(checks), (X,), {}, ())
    model = Calls(checks)
    assert_same(exported(model, X), model, (X,))


# ---------------------------------------------------------------------------------------------
# Sizes


def test_what_export_found_of_the_sizes_is_guarded() -> None:
    def short(lin: nn.Module, x: Tensor) -> Tensor:
        return no_proxies(lin, x) if x.shape[0] < 8 else x

    traced = exported(Calls(short), X)
    assert [guard.value for guard in traced.guards] == [True] * 3
    assert [guard.line.partition(",")[0] for guard in traced.guards] == [
        "x.size()[0] <= 7",
        "x.size()[0] < 8",
        "x.size()[1] == 4",
    ]


def test_sizes_that_cannot_stay_open_are_those_of_the_example() -> None:
    def counts_bits(lin: nn.Module, x: Tensor) -> Tensor:
        return lin(x) * int.bit_length(x.shape[0])

    model = Calls(counts_bits)
    traced = exported(model, X)
    assert "every size is that of the example" in traced.why
    assert traced.guards
    assert_same(traced, model, (X,))

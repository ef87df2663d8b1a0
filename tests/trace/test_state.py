"""The model handed in is as it was after a trace; what its forward updates, the graph updates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpipe.errors import TraceError
from fxpipe.ir.annotations import mutates_of, updates_buffers
from fxpipe.trace import trace
from tests.trace.models import assert_same

X = torch.randn(3, 4)


class Counting(nn.Module):
    """Updates its buffers in each way that Python offers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("last", torch.zeros(4))
        self.plain = torch.zeros(4)
        self.history: list[Any] = []
        self.label = "before"

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        old = self.mean
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.last.copy_(x[0].detach())
        self.plain.add_(1)
        return self.norm(x) * old + self.mean * self.calls


def test_a_trace_leaves_the_model_as_it_was() -> None:
    model = Counting()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    tensors = {name: id(value) for name, value in model.state_dict(keep_vars=True).items()}
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    trace(model, (X,), {})
    assert all(torch.equal(state[n], v) for n, v in model.state_dict().items())
    assert {n: id(v) for n, v in model.state_dict(keep_vars=True).items()} == tensors
    assert {name: vars(module) for name, module in model.named_modules()} == attributes
    assert model.plain.sum() == 0
    assert nn.Module.__setattr__.__module__ == "torch.nn.modules.module"


def test_a_failed_trace_leaves_the_model_as_it_was() -> None:
    class Fails(Counting):
        def forward(self, x: Tensor) -> Tensor:
            self.label = "after"
            self.history.append(x)
            y = super().forward(x)
            return y if y.sum() > 0 else -y

    model = Fails()
    with pytest.raises(TraceError):
        trace(model, (X,), {})
    assert (model.label, model.history) == ("before", [])
    assert isinstance(model.norm.weight, nn.Parameter)
    assert float(model.calls) == 0


def test_every_kind_of_update_is_done_by_the_graph() -> None:
    model = Counting()
    traced = trace(model, (X,), {})
    assert_same(traced, model, (torch.randn(5, 4),))
    assert torch.equal(model.plain, torch.full((4,), 2.0))


def test_a_second_run_reads_what_the_first_assigned() -> None:
    model, reference = Counting(), Counting()
    traced = trace(model, (X,), {})
    for _ in range(3):
        x = torch.randn(3, 4)
        assert torch.equal(traced.module(x)[0], reference(x))
    assert torch.equal(model.mean, reference.mean)


def test_an_assigned_buffer_is_copied_into_at_the_end_of_the_graph() -> None:
    nodes = list(trace(Counting(), (X,), {}).module.graph.nodes)
    assert (nodes[-2].target, mutates_of(nodes[-2])) == ("copy_", ("mean",))
    assert updates_buffers(nodes[-2])
    assert [user.name for user in nodes[-2].args[0].users] == ["clone", "copy__1"]


def test_buffers_that_swap_places_swap_their_values() -> None:
    class Swap(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("a", torch.zeros(4))
            self.register_buffer("b", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            self.a, self.b = self.b, self.a
            return x + self.a

    model = Swap()
    assert_same(trace(model, (X,), {}), model, (X,))


def test_a_tensor_kept_in_an_attribute_is_refused_by_name() -> None:
    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.features = x * 2
            return self.features

    model = Keeps()
    with pytest.raises(TraceError, match="keeps a tensor in its attribute 'features'"):
        trace(model, (X,), {})
    assert "features" not in vars(model)


def test_a_tensor_appended_to_a_list_of_the_model_is_refused_by_name() -> None:
    class Appends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Module()
            self.inner.seen = []

        def forward(self, x: Tensor) -> Tensor:
            self.inner.seen.append(x)
            return x

    model = Appends()
    with pytest.raises(TraceError, match=r"'inner\.seen'"):
        trace(model, (X,), {})
    assert model.inner.seen == []


def test_a_buffer_registered_in_the_forward_is_refused_by_name() -> None:
    class Registers(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.register_buffer("cache", x * 2)
            return x

    with pytest.raises(TraceError, match="'cache'"):
        trace(Registers(), (X,), {})


def test_an_attribute_that_is_cleared_before_the_end_is_no_trouble() -> None:
    class Clears(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.features = x * 2
            y = self.features + 1
            self.features = None
            return y

    model = Clears()
    assert_same(trace(model, (X,), {}), model, (X,))


def test_a_buffer_set_to_another_shape_is_refused_by_name() -> None:
    class Grows(Counting):
        def forward(self, x: Tensor) -> Tensor:
            self.mean = torch.cat([self.mean, self.mean])
            return x

    with pytest.raises(TraceError, match="sets its buffer 'mean' to a tensor of another shape"):
        trace(Grows(), (X,), {})


def test_a_parameter_that_the_model_does_not_own_is_refused() -> None:
    stray = nn.Parameter(torch.ones(4))

    class Stray(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * stray

    with pytest.raises(TraceError, match="reads a parameter that is not registered"):
        trace(Stray(), (X,), {})


def test_a_constant_that_the_model_does_not_own_goes_with_the_graph() -> None:
    stray = torch.full((4,), 3.0)

    class Stray(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * stray

    model = Stray()
    traced = trace(model, (X,), {})
    assert_same(traced, model, (X,))
    assert not traced.module.state_dict()
    assert not vars(model).keys() - vars(nn.Module()).keys()

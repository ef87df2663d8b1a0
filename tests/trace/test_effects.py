"""Nodes say what they write, what they return, if they are random, if gradients flow."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxpipe.ir.annotations import (
    is_random,
    module_path_of,
    mutates_of,
    result_is_of,
    source_of,
    updates_buffers,
    value_of,
)
from fxpipe.trace import trace
from tests.trace.models import assert_same


class Calls(nn.Module):
    """Calls a function on a fresh value, so that it may be written."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.inplace = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * 2)


def nodes_of(model: nn.Module, *args: Tensor) -> dict[str, fx.Node]:
    return {node.name: node for node in trace(model, args, {}).module.graph.nodes}


X = torch.randn(3, 4)


def add_in_place(y: Tensor) -> Tensor:
    y += 1
    return y


def set_item(y: Tensor) -> Tensor:
    y[0] = 0
    return y


def into_out(y: Tensor) -> Tensor:
    return torch.add(y, 1, out=y)


@pytest.mark.parametrize(
    ("function", "name", "returns"),
    [
        (lambda y: y.add_(1), "add_", "mul"),
        (add_in_place, "iadd", "mul"),
        (lambda y: F.relu(y, inplace=True), "relu", "mul"),
        (nn.ReLU(inplace=True), "function", "mul"),
        (set_item, "setitem", None),
        (into_out, "add", "mul"),
        (lambda y: torch._foreach_add_([y], 1) or y, "_foreach_add_", None),
    ],
    ids=["method", "operator", "functional", "module", "setitem", "out", "list"],
)
def test_a_node_names_the_argument_it_writes_and_returns(
    function: Callable[[Tensor], Tensor], name: str, returns: str | None
) -> None:
    model = Calls(function)
    if name == "_foreach_add_":
        name = "foreach_add"
    node = nodes_of(model, X)[name]
    assert mutates_of(node) == ("mul",)
    assert result_is_of(node) == returns
    assert_same(trace(model, (X,), {}), model, (torch.randn(5, 4),))


def test_a_node_that_writes_nothing_says_so() -> None:
    for node in nodes_of(Calls(lambda y: y + 1), X).values():
        assert not (mutates_of(node))
        assert not (updates_buffers(node))
        assert not (is_random(node))


def test_a_write_through_a_view_is_of_the_view() -> None:
    nodes = nodes_of(Calls(lambda y: y[0].zero_() + y), X)
    assert mutates_of(nodes["zero_"]) == ("getitem",)


def test_a_module_that_returns_its_argument_is_no_write() -> None:
    node = nodes_of(Calls(nn.Identity()), X)["function"]
    assert (mutates_of(node), result_is_of(node)) == ((), "mul")


def test_an_operator_in_place_changes_what_others_hold_too() -> None:
    def alias(y: Tensor) -> Tensor:
        held = y
        y += 1
        return held * y

    model = Calls(alias)
    assert_same(trace(model, (X,), {}), model, (X,))


def test_batch_norm_updates_buffers_in_train_mode_alone() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4))
    assert updates_buffers(nodes_of(model, X)["_0"])
    assert not updates_buffers(nodes_of(model.eval(), X)["_0"])


class Statistics(nn.Module):
    def __init__(self, norm: Callable[..., Tensor]) -> None:
        super().__init__()
        self.norm = norm
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x, self.mean, self.var)


@pytest.mark.parametrize(
    ("norm", "name"),
    [
        (lambda x, m, v: F.batch_norm(x, m, v, training=True), "batch_norm"),
        (lambda x, m, v: F.instance_norm(x, m, v, use_input_stats=True), "instance_norm"),
    ],
    ids=["batch", "instance"],
)
def test_functional_norms_write_their_running_statistics(
    norm: Callable[..., Tensor], name: str
) -> None:
    model, x = Statistics(norm), torch.randn(3, 4, 5)
    node = nodes_of(model, x)[name]
    assert set(mutates_of(node)) == {"mean", "var"}
    assert updates_buffers(node)
    assert_same(trace(model, (x,), {}), model, (x,))


@pytest.mark.parametrize(
    ("function", "random"),
    [
        (lambda y: F.dropout(y, 0.5), True),
        (lambda y: F.dropout(y, 0.5, training=False), False),
        (nn.Dropout(0.5), True),
        (lambda y: y + torch.rand(4), True),
        (lambda y: y + torch.ones(4), False),
        (lambda y: F.scaled_dot_product_attention(y, y, y), False),
        (lambda y: F.scaled_dot_product_attention(y, y, y, dropout_p=0.5), True),
    ],
    ids=["dropout", "no dropout", "module", "factory", "constant", "attention", "its dropout"],
)
def test_a_graph_says_where_it_draws_random_numbers(
    function: Callable[[Tensor], Tensor], random: bool
) -> None:
    model = Calls(function)
    assert any(map(is_random, nodes_of(model, X).values())) == random
    assert_same(trace(model, (X,), {}), model, (X,))


def test_values_say_where_gradients_flow() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.lin = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            a = self.frozen(x)
            b = self.lin(a)
            with torch.no_grad():
                c = b * 2
            return b, c, b.detach()

    nodes = nodes_of(Frozen(), X)
    flows = {
        name: value_of(nodes[name]).requires_grad for name in ("frozen", "lin", "mul", "detach")
    }
    assert flows == {"frozen": False, "lin": True, "mul": False, "detach": False}
    assert value_of(nodes["lin"]).shape == (3, 4)


def test_a_value_keeps_what_it_was_before_a_write_changed_it() -> None:
    def widen(y: Tensor) -> Tensor:
        return y.unsqueeze_(0)

    nodes = nodes_of(Calls(widen), X)
    assert value_of(nodes["mul"]).shape == (3, 4)
    assert value_of(nodes["unsqueeze_"]).shape == (1, 3, 4)


def test_nodes_carry_the_users_line_and_the_modules_they_were_called_in() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.relu()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([Inner(), nn.Linear(4, 4)])

        def forward(self, x: Tensor) -> Tensor:
            return self.parts[1](self.parts[0](x))

    nodes = nodes_of(Outer(), X)
    line = Inner.forward.__code__.co_firstlineno + 1
    assert source_of(nodes["relu"]) == f"test_effects.py:{line} in forward"
    assert module_path_of(nodes["relu"]) == (("", "Outer"), ("parts.0", "Inner"))
    assert module_path_of(nodes["parts_1"])[-1] == ("parts.1", "Linear")

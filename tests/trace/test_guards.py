"""A graph knows what Python code saw of the example's sizes, and for which batches it is right."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpipe.passes import RemoveDeadNodes
from fxpipe.shapes import ShapeProbe
from fxpipe.trace import Traced, trace
from fxpipe.trace.guards import Guard

X = torch.randn(3, 4)


class Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def traced_of(function: Callable[[Tensor], Any]) -> Traced:
    return trace(Calls(function), (X,), {})


def holds(traced: Traced, *shape: int) -> bool:
    probe = ShapeProbe(traced.module, [], [], guards=traced.guards, training=True)
    return probe.failing([torch.randn(shape)]) is None


def test_a_branch_on_a_size_is_guarded_with_its_line() -> None:
    def short(x: Tensor) -> Tensor:
        return x if x.shape[0] < 8 else x[:8]

    traced = traced_of(short)
    line = short.__code__.co_firstlineno + 1
    (guard,) = traced.guards
    assert guard == Guard(guard.node, True, f"test_guards.py:{line} in short")
    assert guard.node in [n.name for n in traced.module.graph.nodes]
    assert (holds(traced, 7, 4), holds(traced, 8, 4)) == (True, False)


@pytest.mark.parametrize(
    ("function", "same", "other"),
    [
        (lambda x: sum(x * i for i in range(x.shape[0])), (3, 9), (4, 4)),
        (lambda x: x * [1, 2, 3, 4][x.shape[0]], (3, 9), (2, 4)),
        (lambda x: x * int(x.shape[1] / 3), (1, 5), (1, 6)),
        (lambda x: x * round(x.shape[1] / 3), (1, 3), (1, 6)),
        (lambda x: x * float(x.shape[1]), (1, 4), (1, 5)),
        (lambda x: x * {3: 1.0, 4: 2.0}[x.shape[0]], (3, 1), (4, 4)),
        (lambda x: x * 2 if x.shape[0] in (3, 5) else x, (3, 1), (5, 4)),
        (lambda x: x if x.shape == (3, 4) else x * 2, (3, 4), (3, 5)),
        (lambda x: x if 4 in x.shape else x * 2, (3, 4), (3, 5)),
        (lambda x: x * len(x), (3, 9), (2, 4)),
        (lambda x: torch.stack([row * 2 for row in x]), (3, 9), (2, 4)),
        (lambda x: x * max(x.shape[0], 2), (9, 4), (1, 4)),
        (lambda x: x if x.t().is_contiguous() else x.t(), (3, 9), (1, 4)),
        (lambda x: x if x.is_same_size(x[:3]) else x[:3], (2, 4), (4, 4)),
        (lambda x: x if x.numel() // x.shape[0] == 4 else x + 1, (9, 4), (9, 5)),
    ],
    ids=[
        "range",
        "index",
        "int",
        "round",
        "float",
        "dictionary",
        "tuple",
        "size",
        "contains",
        "len",
        "rows",
        "max",
        "contiguous",
        "same size",
        "computed",
    ],
)
def test_each_way_to_look_at_a_size_is_guarded(
    function: Callable[[Tensor], Any], same: tuple[int, int], other: tuple[int, int]
) -> None:
    traced = traced_of(function)
    assert (holds(traced, 3, 4), holds(traced, *same), holds(traced, *other)) == (True, True, False)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.view(x.shape[0] * 2, -1),
        lambda x: x * x.shape[0] / math.sqrt(x.shape[1]),
        lambda x: x + torch.arange(x.shape[1]),
        lambda x: x if x.dim() == 2 and x.dtype == torch.float32 else x[0],
        lambda x: x if isinstance(x.shape[0], int) and len(x.shape) == 2 else x[0],
        lambda x: x.relu() if x.relu and x.relu not in {1, 2} else x,
    ],
    ids=["view", "computes", "factory", "rank and dtype", "type", "method"],
)
def test_what_holds_for_all_sizes_is_not_guarded(function: Callable[[Tensor], Any]) -> None:
    assert traced_of(function).guards == ()


def test_sizes_of_parameters_are_not_guarded() -> None:
    model = Calls(lambda x: model.layers[0](x) if model.layers[0].weight.shape[0] == 4 else x)
    assert trace(model, (X,), {}).guards == ()


def test_a_branch_on_what_sizes_alone_decide_is_computed_again() -> None:
    def packed(x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1]) % 6
        is_one = bool((positions.diff() == 1).all())
        positions.add_(1)  # after it was looked at
        return x if is_one else x * positions

    traced = traced_of(packed)
    assert [guard.value for guard in traced.guards] == [True]
    assert (holds(traced, 9, 6), holds(traced, 3, 7)) == (True, False)


def test_values_are_compared_exactly() -> None:
    one = Guard("n", 1, "")
    assert [one.holds(v) for v in (1, 1.0, True, 2)] == [True, False, False, False]
    size = Guard("s", (3, 4), "")
    assert [size.holds(v) for v in (torch.Size([3, 4]), (3, 5), (3,))] == [True, False, False]
    assert Guard("f", math.nan, "").holds(math.nan)
    assert Guard("t", [1, 2], "").holds(torch.tensor([1, 2]))


def test_a_run_stops_at_the_guard_that_does_not_hold() -> None:
    def fits(x: Tensor) -> Tensor:
        return x.view(2, -1) if x.numel() % 2 == 0 else x  # cannot be run with nine elements

    traced = traced_of(fits)
    probe = ShapeProbe(traced.module, [], [], guards=traced.guards, training=True)
    assert probe.failing([torch.randn(3, 3)]) is traced.guards[0]


def test_guarded_nodes_are_dead_code_to_the_stages() -> None:
    traced = traced_of(lambda x: x * 2 if x.shape[0] < 8 else x)
    (guard,) = traced.guards
    left = RemoveDeadNodes().run(traced.module).graph
    assert guard.node not in [n.name for n in left.nodes]
    assert len(left.nodes) == 3

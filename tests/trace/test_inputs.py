"""Batches bind to placeholders as they bind to the model's forward."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpipe.errors import InputError
from fxpipe.trace import InputBinder, trace
from tests.trace.models import assert_same


@dataclasses.dataclass
class Result:
    logits: Tensor
    hidden: tuple[Tensor, ...]
    note: str = "done"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        extra: Any = None,
        scale: float = 2.0,
    ) -> Result:
        x = self.lin(x) * scale
        if mask is not None:
            x = x * mask
        for item in (extra or {}).get("shifts", ()):
            x = x + item
        return Result(logits=x, hidden=(x, x.mean(-1)))


X, MASK = torch.randn(2, 4), torch.ones(2, 4)


def test_none_and_defaults_are_constants_of_the_trace() -> None:
    traced = trace(Model(), (X,), {})
    assert [p.name for p in traced.inputs.placeholders] == ["x"]
    assert traced.inputs.bind((X,), {"mask": None, "scale": 2.0})[0] is X


def test_nested_tensors_become_placeholders_named_by_their_path() -> None:
    extra = {"shifts": [X, X]}
    traced = trace(Model(), (X,), {"extra": extra, "mask": MASK})
    got = [(p.name, p.parameter, p.path) for p in traced.inputs.placeholders]
    assert got == [
        ("x", "x", "x"),
        ("mask", "mask", "mask"),
        ("extra_shifts_0", "extra", "extra['shifts'][0]"),
        ("extra_shifts_1", "extra", "extra['shifts'][1]"),
    ]


def test_one_tensor_passed_twice_is_two_inputs() -> None:
    model = Model()
    traced = trace(model, (X, X), {})
    assert_same(traced, model, (torch.randn(3, 4), torch.randn(3, 4)))


def test_the_result_has_the_users_structure() -> None:
    model = Model()
    traced = trace(model, (X,), {"mask": MASK})
    assert str(traced.output) == "Result(logits=*, hidden=(*, *), note=*)"
    assert_same(traced, model, (), {"mask": MASK, "x": X})


def test_a_decorated_forward_binds_by_the_names_of_the_function_it_wraps() -> None:
    def decorated(forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            kwargs["scale"] = kwargs.get("scale", 3.0)
            return forward(self, *args, **kwargs)

        return wrapper

    class Decorated(Model):
        forward = decorated(Model.forward)

    model = Decorated()
    traced = trace(model, (X,), {"mask": MASK})
    assert [p.name for p in traced.inputs.placeholders] == ["x", "mask"]
    assert_same(traced, model, (X, MASK))


def test_starred_parameters_bind_and_keep_their_place() -> None:
    class Starred(nn.Module):
        def forward(self, *parts: Tensor, **named: Tensor) -> Tensor:
            return parts[0] - parts[1] * named["w"]

    model = Starred()
    traced = trace(model, (X, MASK), {"w": X})
    got = [(p.name, p.parameter) for p in traced.inputs.placeholders]
    assert got == [("parts_0", "parts"), ("parts_1", "parts"), ("named_w", "named")]
    assert_same(traced, model, (torch.randn(3, 4), torch.randn(3, 4)), {"w": torch.randn(3, 4)})


def test_a_forward_set_on_the_instance_is_the_one_that_is_traced() -> None:
    model = Model()
    model.forward = lambda y: y + 1  # type: ignore[method-assign, assignment]
    traced = trace(model, (X,), {})
    assert [p.name for p in traced.inputs.placeholders] == ["y"]
    assert torch.equal(traced.module(X)[0], X + 1)


def test_arguments_that_forward_does_not_take_are_reported_with_its_signature() -> None:
    traced = trace(Model(), (X,), {})
    with pytest.raises(InputError, match="unexpected keyword argument 'masc'") as caught:
        traced.inputs.bind((X,), {"masc": MASK})
    assert "forward(x: " in caught.value.at


@pytest.mark.parametrize(
    ("kwargs", "problem"),
    [
        ({"mask": MASK}, "input mask is a 2-dimensional float32 tensor, but None was traced"),
        ({"scale": 3.0}, "input scale is 3.0, but 2.0 was traced"),
        ({"scale": 2}, "input scale is 2, but 2.0 was traced"),
        ({"extra": {"shifts": []}}, "another structure"),
    ],
)
def test_a_batch_of_another_kind_is_refused_with_the_input_that_differs(
    kwargs: dict[str, Any], problem: str
) -> None:
    traced = trace(Model(), (X,), {})
    with pytest.raises(InputError, match=problem):
        traced.inputs.bind((X,), kwargs)


def test_a_tensor_of_another_dtype_or_rank_is_refused() -> None:
    traced = trace(Model(), (X,), {})
    with pytest.raises(InputError, match="2-dimensional float64"):
        traced.inputs.bind((X.double(),), {})
    with pytest.raises(InputError, match="3-dimensional"):
        traced.inputs.bind((X[None],), {})


def test_the_key_of_a_batch_tells_before_a_trace_whether_a_graph_fits() -> None:
    model = Model()
    binder = InputBinder(model)
    spec = trace(model, (X,), {}).inputs
    assert binder.bind((torch.randn(7, 4),), {"scale": 2.0}).key == spec.key
    others = [
        binder.bind((X.double(),), {}),
        binder.bind((X[None],), {}),
        binder.bind((X, MASK), {}),
        binder.bind((X,), {"scale": 1.0}),
        binder.bind((X.clone().requires_grad_(),), {}),
    ]
    assert len({spec.key, *(bound.key for bound in others)}) == 6


def test_a_name_that_python_reserves_still_makes_a_graph() -> None:
    class Reserved(nn.Module):
        def forward(self, input: Tensor, **rest: Tensor) -> Tensor:
            return input + rest["class"]

    model = Reserved()
    traced = trace(model, (X,), {"class": MASK})
    assert_same(traced, model, (X,), {"class": MASK})

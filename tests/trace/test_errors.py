"""A model that no graph can hold is refused with its module, the user's line and a way out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxpipe.errors import OptionError, TraceError
from fxpipe.trace import trace

X = torch.randn(3, 4)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        if x.sum() > 0:
            return self.lin(x)
        return x * 2


class Gated(nn.Module):
    def __init__(self, gate: nn.Module | None = None) -> None:
        super().__init__()
        self.gates = nn.ModuleList([gate or Gate()])

    def forward(self, x: Tensor) -> Tensor:
        return self.gates[0](x * 2)


def test_a_branch_on_a_tensor_names_module_line_and_way_out() -> None:
    with pytest.raises(TraceError) as caught:
        trace(Gated(), (X,), {})
    error = caught.value
    line = Gate.forward.__code__.co_firstlineno + 2
    assert error.problem == "Gate (gates.0) branches on the value of a tensor"
    assert error.at == f"{__file__}:{line} in forward: if x.sum() > 0:"
    assert error.hint.startswith(
        "keep the module as one node with leaf_modules=['gates.0'], "
        "or rewrite the branch with torch.where; torch.export cannot take it either: "
    )


@pytest.mark.parametrize("leaf", ["gates.0", Gate], ids=["name", "class"])
def test_the_way_out_works(leaf: str | type[nn.Module]) -> None:
    model = Gated()
    traced = trace(model, (X,), {}, leaf_modules=[leaf])
    for x in (X.abs(), -X.abs()):
        assert torch.equal(traced.module(x)[0], model(x))
    node = next(n for n in traced.module.graph.nodes if n.op == "call_module")
    assert node.meta["val"].requires_grad is False or node.meta["val"].shape == (3, 4)
    assert node.meta["fxpipe.updates_buffers"]
    assert float(model.gates[0].seen) == 4


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (lambda x: x[: int(x.sum())], "makes an int of the value of a tensor"),
        (lambda x: x * x.sum().item(), "needs the values of a tensor to go on"),
        (lambda x: x[x > 0], "needs the values of a tensor to go on"),
    ],
    ids=["int", "item", "mask"],
)
def test_each_way_to_ask_for_data_is_named(line: object, problem: str) -> None:
    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return line(x)  # type: ignore[operator]

    with pytest.raises(TraceError, match=problem):
        trace(Gated(Asks()), (X,), {})


def test_an_error_of_the_models_own_is_shown_with_its_line() -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ x

    with pytest.raises(
        TraceError, match=r"Wrong \(gates\.0\) failed while it was traced"
    ) as caught:
        trace(Gated(Wrong()), (X,), {})
    assert caught.value.at.endswith("in forward: return x @ x")
    assert caught.value.__cause__ is not None


def test_a_result_that_is_no_container_is_refused() -> None:
    class Cache:
        pass

    class Caches(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Cache]:
            return x, Cache()

    with pytest.raises(TraceError, match="returns a Cache") as caught:
        trace(Caches(), (X,), {})
    assert "use_cache=False" in caught.value.hint


def test_a_leaf_that_names_no_module_is_reported_with_the_names() -> None:
    with pytest.raises(OptionError, match=r"'gate\.0' names no module") as caught:
        trace(Gated(), (X,), {}, leaf_modules=["gate.0"])
    assert "gates.0" in caught.value.hint

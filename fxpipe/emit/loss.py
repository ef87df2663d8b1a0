"""The loss as a function of the last rank's script: traced, so that its source is not needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe import compat
from fxpipe.emit.code import FunctionCode, function_code, import_line
from fxpipe.emit.state import module_tree
from fxpipe.errors import FxpipeError
from fxpipe.ir.annotations import value_of
from fxpipe.trace import Traced, trace

Loss = Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class LossCode:
    """The loss in a script.

    Args:
        function: ``loss(self, *outputs, *target)`` on the tensors among the leaves.
        module: what it calls ``self``.
    """

    function: FunctionCode
    module: nn.Module


def loss_code(
    loss: Loss, model: Traced, pieces: Sequence[Sequence[Tensor]], targets: Sequence[Any]
) -> LossCode:
    """Traces the loss on the output of the model for each shape of a microbatch.

    Args:
        loss: ``loss(output, target)``.
        model: the model.
        pieces: inputs of microbatches, one of each shape.
        targets: their targets; None where no target is known. The loss is then imported by the
            script if it does not trace without one.

    Raises:
        FxpipeError: it cannot be traced, or not for all shapes alike.
    """
    try:
        traced = [
            _trace(loss, _example_output(model, piece), target)
            for piece, target in zip(pieces, targets, strict=True)
        ]
    except FxpipeError as error:
        if all(target is None for target in targets) and model.output.is_leaf:
            return _imported(loss)
        raise FxpipeError(
            f"the loss cannot be written into a script: {error.problem}",
            at=error.at,
            hint=error.hint,
        ) from error
    functions = [function_code(gm.graph, "loss") for gm in traced]
    if any(function != functions[0] for function in functions):
        raise FxpipeError(
            "the loss cannot be written into a script: it is other code for each number of rows",
            at=f"microbatches of {[[list(t.shape) for t in piece] for piece in pieces]}",
            hint="emit with a batch whose rows are a multiple of the microbatches",
        )
    return LossCode(functions[0], module_tree(traced[0]))


class _Call(nn.Module):
    """Calls the loss; one that is a module is traced under the name ``loss``."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, output: Any, target: Any) -> Any:
        return self.loss(output, target)


def _trace(loss: Loss, output: Any, target: Any) -> fx.GraphModule:
    traced = trace(_Call(loss), (output, target), {})
    (result,) = traced.module.graph.find_nodes(op="output")
    value = value_of(result.args[0][0]) if traced.output.is_leaf else None
    if not isinstance(value, Tensor) or value.dim() != 0:
        kind = f"{list(value.shape)}" if isinstance(value, Tensor) else f"{traced.output}"
        raise FxpipeError(
            f"it is {kind}, not a 0-dim tensor", hint="reduce it, for example with .mean()"
        )
    return traced.module


def _example_output(model: Traced, piece: Sequence[Tensor]) -> Any:
    """The output of a microbatch, with fake tensors for leaves."""
    with compat.fake_mode():
        state = {
            name: _fake(tensor)
            for named in (model.module.named_parameters, model.module.named_buffers)
            for name, tensor in named(remove_duplicate=False)
        }
        leaves = torch.func.functional_call(
            model.module, state, tuple(map(_fake, piece)), tie_weights=False
        )
    return model.output.unflatten(
        x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in leaves
    )


def _fake(tensor: Tensor) -> Tensor:
    """A fake tensor like this one, made inside a fake mode; on the CPU if this one has no data."""
    device = "cpu" if tensor.is_meta else tensor.device
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return fake.requires_grad_(tensor.requires_grad)


def _imported(loss: Loss) -> LossCode:
    """A loss that the script imports, for an output and a target of one tensor each."""
    module, called = nn.Module(), "self.loss"
    imports: tuple[str, ...] = ()
    if isinstance(loss, nn.Module):
        module.add_module("loss", loss)
    else:
        called = f"loss_{getattr(loss, '__name__', '')}"
        try:
            imports = (import_line(called, loss, at="the loss"),)
        except FxpipeError as error:
            raise FxpipeError(
                f"the loss cannot be written into a script: without a target it can only be "
                f"imported, and {error.problem}",
                at=error.at,
                hint="pass an example of what it compares with: target=...",
            ) from error
    text = f"def loss(self, output, target):\n    return ({called}(output, target),)\n"
    return LossCode(FunctionCode("loss", text, imports), module)

"""The last stage with the loss at its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from fxpipe import tree
from fxpipe.errors import InputError


class WithLoss(nn.Module):
    """Computes the outputs of the model and, from these and the target, the loss.

    Args:
        compute: the last stage; its outputs are the leaves of the model's output.
        output: structure of the model's output.
        loss: ``loss(output, target)`` -> 0-dim tensor.
    """

    def __init__(
        self, compute: nn.Module, output: tree.TreeSpec, loss: Callable[[Any, Any], Any]
    ) -> None:
        super().__init__()
        self.compute = compute
        self._output = output
        self._loss = (loss,)  # in a tuple: a loss that is a module is no part of the model

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        *others, target = inputs
        outputs = self.compute.forward(*others)
        value = self._loss[0](self._output.unflatten(list(outputs)), target)
        if not isinstance(value, Tensor) or value.dim() != 0:
            kind = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise InputError(
                f"the loss is {kind}, not a 0-dim tensor",
                at=f"loss = {getattr(self._loss[0], '__name__', self._loss[0])}",
                hint="reduce it, for example with .mean()",
            )
        return (*outputs, value)


def output_is_loss(output: Any, target: Any) -> Any:
    """The loss of a model that computes it itself: the output, or what it holds as ``loss``."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    return getattr(output, "loss", output)

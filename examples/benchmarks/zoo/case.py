"""What a model of the zoo is: a name, and how to make the model and one batch for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 4
"""Rows of a batch: two microbatches of two rows, since BatchNorm needs more than one value."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and one batch for it.

    Args:
        model: random weights.
        args: positional inputs.
        kwargs: keyword inputs.
        target: what the loss compares with.
        loss: ``loss(output, target)``; None: the model computes it.
        batch_dims: as for ``fxpipe.compile``.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    target: Any = None
    loss: Callable[[Any, Any], Tensor] | None = None
    batch_dims: Mapping[str, int | None] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of the zoo.

    Args:
        family: kind of model, as in ``tv-video``.
        name: as its library calls it, a variant after ``+``.
        build: makes the case; draws random numbers.
        on_meta: the model is too large to run: it is built without data, and only compiled.
    """

    family: str
    name: str
    build: Callable[[], Case]
    on_meta: bool = False

    def case(self) -> Case:
        """The model and its batch, the same at every call."""
        torch.manual_seed(0)
        with torch.device("meta" if self.on_meta else "cpu"):
            return self.build()


def squares(output: Any, target: object) -> Tensor:
    """A loss for any output: the mean of squares, summed over its floating point tensors.

    Outputs that are contrasted or sampled have no other target that is worth the lines.
    """
    leaves = torch.utils._pytree.tree_leaves(output)
    floats = [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]
    return torch.stack([x.square().mean() for x in floats]).sum()

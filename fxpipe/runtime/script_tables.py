"""What one rank's script says besides its functions, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

from fxpipe import tree
from fxpipe.errors import InputError
from fxpipe.runtime.microbatches import BatchDims
from fxpipe.runtime.stage import Layout, Stage
from fxpipe.schedule import Action, Kind, Routes

Shapes: TypeAlias = tuple[tuple[int, ...], ...]
"""Shape of each input of a microbatch."""


def shapes_of(inputs: Sequence[Tensor]) -> Shapes:
    """The shape of each input."""
    return tuple(tuple(tensor.shape) for tensor in inputs)


@dataclasses.dataclass(frozen=True)
class Script:
    """What one rank's script says besides its functions.

    Args:
        emission: the same in all scripts that were written together.
        rank: r.
        placement: rank of every stage.
        microbatches: M.
        routes: between which stages tensors and gradients go.
        inputs: the model's inputs, and along which dimension each is cut.
        outputs: each leaf of the model's output, as the user would write it.
        has_loss: the last stage computes the loss.
        target: what `form_of` says of the targets that the loss was traced for; None: not known.
        loss_reduction: ``"mean"`` or ``"sum"``.
        layouts: what crosses, for each shape of a microbatch that the scripts can run.
        tied: stages of each parameter that several stages hold, by its first name.
        names: first name of each tied parameter that a stage of this rank holds under another.
        functions: the function of each stage of this rank.
        loss: the loss, on the rank of the last stage; None elsewhere, and where none is computed.
        step: calls ``p.F(stage, microbatch)`` and so on, in the order of the rank's actions.
        stages: the stages of this rank, from their modules.
        output_dims: the dimension of the rows of each leaf of the model's output, None where it has
            none; empty: 0 for all.
    """

    emission: str
    rank: int
    placement: tuple[int, ...]
    microbatches: int
    routes: Routes
    inputs: BatchDims
    outputs: tuple[str, ...]
    has_loss: bool
    target: str | None
    loss_reduction: str
    layouts: Mapping[Shapes, Layout]
    tied: Mapping[str, tuple[int, ...]]
    names: Mapping[str, str]
    functions: Mapping[int, Callable[..., Any]]
    loss: Callable[..., Any] | None
    step: Callable[[Any], None]
    stages: Callable[[Mapping[int, nn.Module]], Sequence[Stage]]
    output_dims: tuple[int | None, ...] = ()

    @property
    def program(self) -> tuple[Action, ...]:
        """The actions that ``step`` performs, found by running it once."""
        recorder = Recorder()
        self.step(recorder)
        return tuple(recorder.actions)

    def layout_of(self, inputs: Sequence[Tensor]) -> Layout:
        """The layout of a microbatch.

        Raises:
            InputError: the scripts were not written for its shapes.
        """
        shapes = shapes_of(inputs)
        if (layout := self.layouts.get(shapes)) is None:
            known = " or ".join(str([list(s) for s in known]) for known in self.layouts)
            raise InputError(
                f"the scripts are for microbatches of {known}, "
                f"and this batch has one of {[list(s) for s in shapes]}",
                at=f"inputs: {', '.join(self.inputs.names)}; {self.microbatches} microbatches",
                hint="emit again with a batch of this shape",
            )
        return layout


class Recorder:
    """What ``step`` is called with to learn its order: ``p.SEND_F(1, 0)`` notes ``1SEND_F0``."""

    def __init__(self) -> None:
        self.actions: list[Action] = []

    def __getattr__(self, name: str) -> Callable[[int, int], None]:
        if name not in Kind.__members__:
            raise AttributeError(f"no action {name!r}: they are {', '.join(Kind)}")
        return lambda stage, microbatch: self.actions.append(Action(stage, Kind[name], microbatch))


def form_of(target: Any) -> str:
    """What code traced for one target takes for granted about others.

    >>> import torch
    >>> form_of({"label": torch.zeros(4, dtype=torch.int64), "top": 5})
    "{'label': *, 'top': *} with int64[1d], 5"
    """
    leaves, structure = tree.flatten(target)
    return f"{structure} with {', '.join(map(_form_of_leaf, leaves))}"


def _form_of_leaf(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}[{leaf.dim()}d]"
    return repr(leaf)

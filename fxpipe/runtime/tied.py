"""Parameters that several stages hold: one gradient, summed after the last backward of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping, Sequence

import torch
from torch import Tensor, nn

from fxpipe import compat
from fxpipe.runtime.collectives import Collectives


@dataclasses.dataclass
class TiedParameter:
    """One parameter and the stages that hold it.

    Args:
        name: its canonical name.
        stages: all stages that hold it, ascending.
        held: for each of the stages in this process, ascending, the parameter it computes with; the
            first is the one that users see.
        rank_of: rank of each of the stages.
        is_chained: the gradient goes from stage to stage with every microbatch, and the first
            stage has the whole of it; else each stage adds up its own.
    """

    name: str
    stages: tuple[int, ...]
    held: dict[int, nn.Parameter]
    rank_of: dict[int, int]
    is_chained: bool

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold it, ascending."""
        return tuple(sorted(set(self.rank_of.values())))

    @property
    def visible(self) -> nn.Parameter | None:
        """The parameter that users of this process see."""
        return next(iter(self.held.values()), None)


def find_tied(
    tied: Mapping[str, Sequence[int]],
    modules: Mapping[int, nn.Module],
    placement: Sequence[int],
    parameters: Mapping[str, nn.Parameter],
    chained: Container[str],
) -> list[TiedParameter]:
    """Gives each stage of this process a gradient of its own for every tied parameter.

    Each stage adds up its own microbatches, in one process as on many ranks, so both give the same
    bits. The memory stays shared.

    Args:
        tied: stages of each tied parameter, by canonical name.
        modules: the stages of this process.
        placement: rank of every stage.
        parameters: the parameters of this process, by canonical name.
        chained: names of those whose gradients go from stage to stage.
    """
    found = []
    for name, stages in tied.items():
        held: dict[int, nn.Parameter] = {}
        for stage in sorted(set(stages) & set(modules)):
            held[stage] = parameters[name]
            if len(held) > 1:
                held[stage] = _own(parameters[name], modules[stage])
        rank_of = {s: placement[s] for s in stages}
        found.append(TiedParameter(name, tuple(stages), held, rank_of, name in chained))
    return found


def _own(parameter: nn.Parameter, module: nn.Module) -> nn.Parameter:
    """Makes a stage compute with a parameter of its own in the same memory."""
    own = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    for child in module.modules():
        compat.replace_state(child, parameter, own)
    return own


class TiedGradients:
    """Brings the gradients of tied parameters of one step together, and to all who hold them."""

    def __init__(self, tied: Sequence[TiedParameter], collectives: Collectives) -> None:
        self._tied = [t for t in tied if t.visible is not None and t.visible.requires_grad]
        self._collectives = collectives
        self._before: list[Tensor | None] = []

    def begin(self) -> None:
        """Sets aside the gradients of earlier steps, which are whole already."""
        self._before = []
        for tied in self._tied:
            assert tied.visible is not None
            self._before.append(tied.visible.grad)
            for stage, parameter in tied.held.items():
                if not (tied.is_chained and stage == tied.stages[0]):
                    parameter.grad = None

    def finish(self) -> None:
        """Puts the whole gradient where users look for it."""
        for tied, before in zip(self._tied, self._before, strict=True):
            assert tied.visible is not None
            if tied.is_chained:
                # the first stage has added to what was there before the step
                total = tied.held[tied.stages[0]].grad if tied.stages[0] in tied.held else None
                parts = {} if total is None else {tied.rank_of[tied.stages[0]]: total}
            else:
                parts = _by_rank(tied)
            total = self._shared(tied, parts)
            for parameter in tied.held.values():
                parameter.grad = None
            if not tied.is_chained and before is not None:
                total = before if total is None else before + total
            tied.visible.grad = total

    def _shared(self, tied: TiedParameter, parts: dict[int, Tensor]) -> Tensor | None:
        """The sum of the parts of all ranks, as the first rank of this process sees it."""
        assert tied.visible is not None
        here = {tied.rank_of[s] for s in tied.held}
        if here == set(tied.ranks) and (not parts or tied.is_chained):
            return next(iter(parts.values()), None)
        for rank in here - set(parts):  # others may have a gradient where this one has none
            parts[rank] = torch.zeros_like(tied.visible)
        if len(tied.ranks) > 1:
            self._collectives.add(parts, tied.ranks)
        return parts[min(here)]


def _by_rank(tied: TiedParameter) -> dict[int, Tensor]:
    """Sum of the gradients of each rank's stages, the last stage first, as autograd adds them."""
    parts: dict[int, Tensor] = {}
    for stage, parameter in reversed(tied.held.items()):
        if parameter.grad is not None:
            rank = tied.rank_of[stage]
            parts[rank] = parts[rank] + parameter.grad if rank in parts else parameter.grad
    return parts

"""Parameters that several stages hold: one gradient, summed after the last backward of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

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
        ranks: the ranks of these stages, each once, ascending.
        held: for each of the stages in this process, ascending, its rank and the parameter it
            computes with; the first is the one that users see.
    """

    name: str
    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    held: list[tuple[int, nn.Parameter]]


def find_tied(
    tied: Mapping[str, Sequence[int]],
    modules: Mapping[int, nn.Module],
    placement: Sequence[int],
    parameters: Mapping[str, nn.Parameter],
) -> list[TiedParameter]:
    """Gives each stage of this process a gradient of its own for every tied parameter.

    Each stage adds up its own microbatches, in one process as on many ranks, so both give the same
    bits. The memory stays shared.

    Args:
        tied: stages of each tied parameter, by canonical name.
        modules: the stages of this process.
        placement: rank of every stage.
        parameters: the parameters of this process, by canonical name.
    """
    found = []
    for name, stages in tied.items():
        ranks = tuple(sorted({placement[s] for s in stages}))
        held: list[tuple[int, nn.Parameter]] = []
        for stage in sorted(set(stages) & set(modules)):
            own = parameters[name]
            if held:
                own = nn.Parameter(own.detach(), requires_grad=own.requires_grad)
                for module in modules[stage].modules():
                    compat.replace_state(module, parameters[name], own)
            held.append((placement[stage], own))
        found.append(TiedParameter(name, tuple(stages), ranks, held))
    return found


class TiedGradients:
    """Sums the gradients of one step over the stages and adds them to what was there before it."""

    def __init__(self, tied: Sequence[TiedParameter], collectives: Collectives) -> None:
        self._tied, self._collectives = tied, collectives
        self._before: list[Tensor | None] = []

    def begin(self) -> None:
        """Sets aside the gradients of earlier steps, which are sums already."""
        self._before = []
        for tied in self._tied:
            self._before.append(tied.held[0][1].grad if tied.held else None)
            for _, parameter in tied.held:
                parameter.grad = None

    def finish(self) -> None:
        """Puts the sum over all stages where users look for it."""
        for tied, before in zip(self._tied, self._before, strict=True):
            if not tied.held or not tied.held[0][1].requires_grad:
                continue
            visible = tied.held[0][1]
            total = self._sum(tied)
            for _, parameter in tied.held:
                parameter.grad = None
            if before is not None and total is not None:
                total = before + total
            visible.grad = before if total is None else total

    def _sum(self, tied: TiedParameter) -> Tensor | None:
        by_rank: dict[int, Tensor] = {}
        for rank, parameter in tied.held:
            if parameter.grad is not None:
                have = by_rank.get(rank)
                by_rank[rank] = parameter.grad if have is None else have + parameter.grad
        held = {rank for rank, _ in tied.held}
        if not by_rank and held == set(tied.ranks):
            return None
        for rank in held - set(by_rank):  # others may have a gradient where this one has none
            by_rank[rank] = torch.zeros_like(tied.held[0][1])
        if len(tied.ranks) > 1:
            self._collectives.add(by_rank, tied.ranks)
        return by_rank[tied.held[0][0]]

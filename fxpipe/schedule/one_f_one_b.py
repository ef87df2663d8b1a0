"""1F1B: as many forwards as fill the pipeline, then one backward for each forward."""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.schedule.actions import Action, Kind
from fxpipe.schedule.orders import Schedule


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """Orders the compute of each rank, one stage a rank; rank r holds at most S - r activations.

    >>> from fxpipe.schedule import format_grid
    >>> print(format_grid(one_f_one_b(3, 4)), end="")
    rank 0 | 0F0 0F1 0F2 .   .   0B0 0F3 0B1 .   0B2 .   0B3
    rank 1 | .   1F0 1F1 .   1B0 1F2 1B1 1F3 1B2 .   1B3 .
    rank 2 | .   .   2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 .   .
    bubble 33.3%

    Args:
        stages: S >= 1.
        microbatches: M >= 1. Below S the pipeline never fills.

    Returns:
        2*M actions a rank.

    Source: PipeDream-Flush, Narayanan et al., arXiv:2006.09503, section 3.2; also arXiv:2104.04473,
    section 2.2.1, without interleaving.
    """
    orders = tuple(tuple(_order(rank, stages, microbatches)) for rank in range(stages))
    return Schedule("1F1B", orders, tuple(range(stages)), microbatches)


def _order(rank: int, stages: int, microbatches: int) -> Iterator[Action]:
    warmup = min(stages - 1 - rank, microbatches)
    for m in range(warmup):
        yield Action(rank, Kind.F, m)
    for m in range(warmup, microbatches):  # steady: one forward, one backward
        yield Action(rank, Kind.F, m)
        yield Action(rank, Kind.B, m - warmup)
    for m in range(microbatches - warmup, microbatches):  # cooldown
        yield Action(rank, Kind.B, m)

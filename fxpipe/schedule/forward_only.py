"""Forward only: evaluation and inference, whatever the schedule of training."""

from __future__ import annotations

from fxpipe.schedule.actions import Action, Kind
from fxpipe.schedule.orders import Schedule


def forward_only(stages: int, microbatches: int) -> Schedule:
    """Orders the forwards of each rank, one stage a rank; nothing is held for a backward.

    >>> from fxpipe.schedule import format_grid
    >>> print(format_grid(forward_only(3, 4)), end="")
    rank 0 | 0F0 0F1 0F2 0F3 .   .
    rank 1 | .   1F0 1F1 1F2 1F3 .
    rank 2 | .   .   2F0 2F1 2F2 2F3
    bubble 33.3%, span 0.0%

    Args:
        stages: S >= 1.
        microbatches: M >= 1.

    Returns:
        M actions a rank.
    """
    orders = tuple(tuple(Action(s, Kind.F, m) for m in range(microbatches)) for s in range(stages))
    return Schedule("ForwardOnly", orders, tuple(range(stages)), microbatches)

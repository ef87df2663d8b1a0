"""GPipe: every forward, then every backward."""

from __future__ import annotations

from fxpipe.schedule.actions import Action, Kind
from fxpipe.schedule.orders import Schedule


def gpipe(stages: int, microbatches: int) -> Schedule:
    """Orders the compute of each rank, one stage a rank; a rank holds all M activations.

    >>> from fxpipe.schedule import format_grid
    >>> print(format_grid(gpipe(3, 4)), end="")
    rank 0 | 0F0 0F1 0F2 0F3 .   .   .   .   0B0 0B1 0B2 0B3
    rank 1 | .   1F0 1F1 1F2 1F3 .   .   1B0 1B1 1B2 1B3 .
    rank 2 | .   .   2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3 .   .
    bubble 33.3%

    Backwards run in the order of the forwards, so that gradients add up in the order in which a
    single process would add them; the paper runs them the other way round.

    Args:
        stages: S >= 1.
        microbatches: M >= 1.

    Returns:
        2*M actions a rank.

    Source: Huang et al., arXiv:1811.06965, section 2.3.
    """
    orders = tuple(
        tuple(Action(s, kind, m) for kind in (Kind.F, Kind.B) for m in range(microbatches))
        for s in range(stages)
    )
    return Schedule("GPipe", orders, tuple(range(stages)), microbatches)

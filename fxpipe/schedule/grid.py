"""Draws a schedule as the grid the papers draw, as text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fxpipe.schedule.comms import add_transfers
from fxpipe.schedule.orders import Routes, Schedule
from fxpipe.schedule.replay import Span
from fxpipe.schedule.simulate import Costs, Timeline, simulate


def format_grid(drawn: Schedule | Timeline, *, cell: float | None = None) -> str:
    """One line a rank, one column a `cell` of time, and the bubble.

    >>> from fxpipe.schedule.one_f_one_b import one_f_one_b
    >>> print(format_grid(one_f_one_b(2, 3)), end="")
    rank 0 | 0F0 0F1 .   0B0 0F2 0B1 .   0B2
    rank 1 | .   1F0 1B0 1F1 1B1 1F2 1B2 .
    bubble 25.0%

    A dot is idle time, a dash goes on with the action before it. The span bubble is printed where
    it differs from the makespan bubble.

    Args:
        drawn: a schedule is drawn as a chain of stages with actions of one cell each.
        cell: in the unit of the timeline; None: the shortest action. An action takes at least one
            column, so that actions much shorter than a cell stretch their line.
    """
    timeline = drawn if isinstance(drawn, Timeline) else _unit_timeline(drawn)
    shortest = min(
        (s.end - s.start for r in timeline.spans for s in r if s.end > s.start), default=1
    )
    rows = [_cells(rank, cell or shortest) for rank in timeline.spans]
    width = max((len(text) for row in rows for text in row), default=0) + 1
    columns = max((len(row) for row in rows), default=0)
    label = len(str(len(rows) - 1))
    lines = [
        f"rank {rank:>{label}} | "
        + "".join(text.ljust(width) for text in [*row, *["."] * (columns - len(row))]).rstrip()
        for rank, row in enumerate(rows)
    ]
    return "\n".join([*lines, _bubble_line(timeline)]) + "\n"


def _unit_timeline(schedule: Schedule) -> Timeline:
    routes = Routes.chain(schedule.stages)
    return simulate(
        add_transfers(schedule, routes), placement=schedule.placement, routes=routes, costs=Costs()
    )


def _cells(spans: Sequence[Span], cell: float) -> list[str]:
    row: list[str] = []
    for start, end, action in spans:
        row += ["."] * (_column(start, cell) - len(row))
        row += [str(action)]
        row += ["-"] * (_column(end, cell) - len(row))
    return row


def _column(time: float, cell: float) -> int:
    """The column that begins at or before `time`; sums of costs may fall short by rounding."""
    return math.floor(time / cell + 1e-6)


def _bubble_line(timeline: Timeline) -> str:
    line, span = f"bubble {timeline.bubble:.1%}", f"{timeline.span_bubble:.1%}"
    return line if line.endswith(f" {span}") else f"{line}, span {span}"

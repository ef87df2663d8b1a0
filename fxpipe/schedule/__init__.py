"""Schedules as data: made by pure functions, checked, placed in time and drawn. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fxpipe.errors import OptionError
from fxpipe.schedule.actions import Action, Kind
from fxpipe.schedule.comms import add_transfers
from fxpipe.schedule.forward_only import forward_only as make_forward_only
from fxpipe.schedule.gpipe import gpipe
from fxpipe.schedule.grid import format_grid
from fxpipe.schedule.one_f_one_b import one_f_one_b
from fxpipe.schedule.orders import Program, Routes, Schedule
from fxpipe.schedule.roll import Loop, expand, roll
from fxpipe.schedule.simulate import Costs, Timeline, simulate
from fxpipe.schedule.verify import verify

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "Kind",
    "Loop",
    "Program",
    "Routes",
    "Schedule",
    "Timeline",
    "add_transfers",
    "expand",
    "format_grid",
    "make_schedule",
    "roll",
    "simulate",
    "verify",
]

_ONE_STAGE_A_RANK: Final[dict[str, Callable[[int, int], Schedule]]] = {
    "GPipe": gpipe,
    "1F1B": one_f_one_b,
}

SCHEDULES: Final = tuple(_ONE_STAGE_A_RANK)
"""The names `make_schedule` knows."""


def make_schedule(
    name: str, *, stages: int, chunks: int = 1, microbatches: int, forward_only: bool = False
) -> Schedule:
    """Makes the schedule of that name, whatever its case.

    Args:
        name: one of ``SCHEDULES``.
        stages: S >= 1, over all ranks.
        chunks: V, stages a rank.
        microbatches: M >= 1.
        forward_only: the forwards alone, placed as `name` places its stages.

    Raises:
        OptionError: no schedule has that name, or it does not exist for these sizes.
    """
    found = next((known for known in SCHEDULES if known.lower() == name.lower()), None)
    if found is None:
        raise OptionError(
            f"no schedule is named {name!r}", hint=f"schedules are: {', '.join(SCHEDULES)}"
        )
    if stages < 1 or microbatches < 1:
        raise OptionError(
            f"{found} needs a stage and a microbatch",
            at=f"stages={stages}, microbatches={microbatches}",
        )
    if chunks != 1:
        raise OptionError(
            f"{found} holds one stage a rank", at=f"chunks={chunks}", hint="use chunks=1"
        )
    make = make_forward_only if forward_only else _ONE_STAGE_A_RANK[found]
    return make(stages, microbatches)

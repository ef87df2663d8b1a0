"""Adds the transfers to an order of compute actions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fxpipe.errors import OptionError
from fxpipe.schedule.actions import RECEIVES, SENDS, Action, Kind
from fxpipe.schedule.orders import Program, Routes, Schedule, StagesOf


def add_transfers(schedule: Schedule, routes: Routes, *, prefetch: int = 1) -> Program:
    """Sends each result right after it is made, and receives `prefetch` actions before the need.

    >>> from fxpipe.schedule.one_f_one_b import one_f_one_b
    >>> for rank in add_transfers(one_f_one_b(2, 2), Routes.chain(2), prefetch=1):
    ...     print(*rank)
    0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1
    1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1

    Receives keep the order of the actions that need them. With one stage a rank that is the order
    of the sends; for anything else ``verify`` decides.

    Args:
        routes: which stages send to which. A stage without routes, or with all of them on its own
            rank, gets no transfer.
        prefetch: how many compute actions a receive is posted ahead, >= 0; 0 is right before the
            action that needs it. Each one ahead costs the buffers of one more microbatch.

    Raises:
        OptionError: `prefetch` is negative.
        ScheduleError: a route names a stage that the schedule does not have.
    """
    if prefetch < 0:
        raise OptionError(f"prefetch is {prefetch}", hint="use 0 or more; 1 hides most transfers")
    ends = routes.transfer_ends(schedule.placement)
    return tuple(tuple(_with_transfers(order, ends, prefetch)) for order in schedule.orders)


def _with_transfers(order: tuple[Action, ...], ends: StagesOf, prefetch: int) -> Iterator[Action]:
    posted = 0
    for k, action in enumerate(order):
        for later in order[posted : k + prefetch + 1]:
            yield from _transfer(later, RECEIVES, ends)
        posted = k + prefetch + 1
        yield action
        yield from _transfer(action, SENDS, ends)


def _transfer(action: Action, kinds: Mapping[Kind, Kind], ends: StagesOf) -> Iterator[Action]:
    kind = kinds.get(action.kind)
    if kind is not None and (action.stage, kind) in ends:
        yield Action(action.stage, kind, action.microbatch)

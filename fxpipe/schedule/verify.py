"""Proves before a run that a program is complete and cannot deadlock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product

from fxpipe.errors import ScheduleError
from fxpipe.schedule.actions import COMPUTE, Action, Kind
from fxpipe.schedule.orders import Program, Routes
from fxpipe.schedule.replay import Replay
from fxpipe.schedule.stuck import deadlock, smallest_stuck_set


def verify(
    program: Program,
    *,
    placement: Sequence[int],
    routes: Routes,
    microbatches: int,
    forward_only: bool = False,
) -> None:
    """Passes if every rank reaches its end, over any transport, having done all there is to do.

    Checked are: every F, and B or else I and W, once, on the rank of its stage; every transfer
    that `routes` asks for, once; the same order of messages at both ends of each (source rank,
    destination rank, direction); no wait cycle while transfers are not buffered (see ``Replay``).

    >>> from fxpipe.schedule.comms import add_transfers
    >>> from fxpipe.schedule.gpipe import gpipe
    >>> routes = Routes.chain(2)
    >>> first, last = add_transfers(gpipe(2, 2), routes)
    >>> verify((first, last[1:]), placement=(0, 1), routes=routes, microbatches=2)
    Traceback (most recent call last):
        ...
    fxpipe.errors.ScheduleError: 1RECV_F0 is missing from the program of rank 1
      at: rank 1 waits at 1F0 for 1RECV_F0, which does not stand before it

    Args:
        program: one tuple of actions a rank.
        placement: the rank of each stage.
        routes: which stages send to which.
        microbatches: M.
        forward_only: the program has an F for each microbatch, and no other compute.

    Raises:
        ScheduleError: with the rank, and the smallest set of ranks that are stuck if any are.
    """
    _check_placement(program, placement)
    _check_compute(program, placement, microbatches, forward_only)
    fault = next(_transfer_faults(program, placement, routes, microbatches, forward_only), "")
    replay = Replay(program, placement=placement, routes=routes)
    replay.run()
    if fault or smallest_stuck_set(replay):
        raise deadlock(replay, fault)


def _check_placement(program: Program, placement: Sequence[int]) -> None:
    for stage, rank in enumerate(placement):
        if not 0 <= rank < len(program):
            raise ScheduleError(
                f"stage {stage} is placed on rank {rank}, but the program has {len(program)} ranks"
            )


def _check_compute(
    program: Program, placement: Sequence[int], microbatches: int, forward_only: bool
) -> None:
    seen: set[Action] = set()
    for rank, action in _actions(program):
        if action.kind not in COMPUTE:
            continue
        stage, kind, m = action
        if not (0 <= stage < len(placement) and 0 <= m < microbatches):
            raise ScheduleError(
                f"{action} names a stage or microbatch that does not exist",
                at=f"rank {rank}",
                hint=f"there are {len(placement)} stages and {microbatches} microbatches",
            )
        if placement[stage] != rank:
            raise ScheduleError(
                f"{action} is not on the rank of its stage, {placement[stage]}", at=f"rank {rank}"
            )
        if forward_only and kind is not Kind.F:
            raise ScheduleError(f"{action} stands in a forward-only program", at=f"rank {rank}")
        if action in seen:
            raise ScheduleError(f"{action} stands twice", at=f"rank {rank}")
        seen.add(action)
    for stage, m in product(range(len(placement)), range(microbatches)):
        kinds = {kind for kind in COMPUTE if (stage, kind, m) in seen}
        _check_kinds(kinds, stage, m, placement[stage], forward_only)


def _check_kinds(kinds: set[Kind], stage: int, m: int, rank: int, forward_only: bool) -> None:
    whole, split = {Kind.F, Kind.B}, {Kind.F, Kind.I, Kind.W}
    if kinds in ([{Kind.F}] if forward_only else [whole, split]):
        return
    found = ", ".join(sorted(kinds)) or "nothing"
    wanted = "F" if forward_only else "F and B, or F, I and W"
    raise ScheduleError(
        f"stage {stage} runs {found} for microbatch {m}, not {wanted}", at=f"rank {rank}"
    )


def _transfer_faults(
    program: Program,
    placement: Sequence[int],
    routes: Routes,
    microbatches: int,
    forward_only: bool,
) -> Iterator[str]:
    """Transfers that are repeated, missing, or asked for by no route."""
    ends = [
        (stage, kind, placement[stage])
        for stage, kind in sorted(routes.transfer_ends(placement))
        if not (forward_only and kind in (Kind.SEND_B, Kind.RECV_B))
    ]
    wanted = {(r, Action(s, kind, m)) for s, kind, r in ends for m in range(microbatches)}
    found = Counter(item for item in _actions(program) if item[1].kind not in COMPUTE)
    for (rank, action), count in found.items():
        if (rank, action) not in wanted:
            yield f"no route asks for {action} on rank {rank}"
        elif count > 1:
            yield f"{action} stands {count} times in the program of rank {rank}"
    for rank, action in sorted(wanted - found.keys()):
        yield f"{action} is missing from the program of rank {rank}"


def _actions(program: Program) -> Iterator[tuple[int, Action]]:
    return ((rank, action) for rank, order in enumerate(program) for action in order)

"""Explains a replay that stopped before its end: who waits at which action, for what, from whom."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fxpipe.errors import ScheduleError
from fxpipe.schedule.actions import COMPUTE
from fxpipe.schedule.replay import Message, Replay


class Wait(NamedTuple):
    """`blocker` is the rank that could end the wait; None if nothing ever does."""

    rank: int
    text: str
    blocker: int | None = None


def smallest_stuck_set(replay: Replay) -> list[Wait]:
    """The fewest ranks that no rank outside the set can free; empty if the replay reached its end.

    That is one rank whose wait nothing can end, or else a shortest cycle of ranks that wait for
    each other. The others are stuck behind it.
    """
    waits = [wait for rank in range(len(replay.program)) for wait in _waits(replay, rank)]
    waits = waits or list(_leftovers(replay))
    hopeless = [wait for wait in waits if wait.blocker is None]
    return hopeless[:1] or _shortest_cycle(waits)


def deadlock(replay: Replay, problem: str = "") -> ScheduleError:
    """The error for a replay that stopped, with the smallest stuck set as its place."""
    stuck = smallest_stuck_set(replay)
    return ScheduleError(problem or "schedule deadlocks", at="; ".join(w.text for w in stuck))


def _waits(replay: Replay, rank: int) -> Iterator[Wait]:
    action = replay.at(rank)
    if action is None:
        return
    here = f"rank {rank} waits at {action} for"
    for value in replay.missing_values(action):
        yield Wait(rank, f"{here} {value}, which does not stand before it")
    if action.kind in COMPUTE:
        for message in replay.missing_messages(action):
            yield _message_wait(replay, rank, here, message)


def _message_wait(replay: Replay, rank: int, here: str, message: Message) -> Wait:
    key = replay.key(message)
    source, sent, received = key[0], replay.sent[key], replay.received[key]
    if message not in received:
        return Wait(rank, f"{here} {message.receive}, which does not stand before it")
    here += f" {message.send} from rank {source}"
    if sent:
        return Wait(rank, f"{here}, {_mismatch(sent, received)}")
    if replay.at(source) is None:
        return Wait(rank, f"{here}, which ends without sending {received[0]}")
    return Wait(rank, here, source)


def _leftovers(replay: Replay) -> Iterator[Wait]:
    """Transfers that no compute action waits for and that would still never finish."""
    for key in sorted({*replay.sent, *replay.received}):
        sent, received = replay.sent[key], replay.received[key]
        source, target, _ = key
        if sent:
            why = _mismatch(sent, received) if received else "which never receives it"
            yield Wait(source, f"rank {source} waits at {sent[0].send} for rank {target}, {why}")
        elif received:
            here = f"rank {target} waits at {received[0].receive} for rank {source}"
            yield Wait(target, f"{here}, which never sends it")


def _mismatch(sent: Sequence[Message], received: Sequence[Message]) -> str:
    return f"where {sent[0]} is sent and {received[0]} received"


def _shortest_cycle(waits: Sequence[Wait]) -> list[Wait]:
    cycles = [_cycle_from(wait.rank, waits) for wait in waits]
    return min((cycle for cycle in cycles if cycle), key=len, default=[])


def _cycle_from(start: int, waits: Sequence[Wait]) -> list[Wait]:
    """The shortest way from rank `start` over blockers back to it; empty if there is none."""
    paths: dict[int, list[Wait]] = {start: []}
    queue = deque([start])
    while queue:
        rank = queue.popleft()
        for wait in waits:
            if wait.rank != rank or wait.blocker is None:
                continue
            if wait.blocker == start:
                return [*paths[rank], wait]
            if wait.blocker not in paths:
                paths[wait.blocker] = [*paths[rank], wait]
                queue.append(wait.blocker)
    return []

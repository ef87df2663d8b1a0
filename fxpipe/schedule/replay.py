"""Runs a program in virtual time under rendezvous, for ``verify`` and ``simulate``.

Terms:
    message: what one stage sends another for one microbatch, in one direction.
    key: (source rank, destination rank, direction). One in-order queue at each end.
    link: (source rank, destination rank). Carries one message at a time, of either direction.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from fxpipe.schedule.actions import COMPUTE, DIRECTION, RECEIVES, SENDS, Action, Kind
from fxpipe.schedule.orders import Program, Routes

Key: TypeAlias = tuple[int, int, Kind]


class Message(NamedTuple):
    source: int
    target: int
    direction: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.direction}{self.microbatch} of {self.source}->{self.target}"

    @property
    def send(self) -> Action:
        return Action(self.source, SENDS[self.direction], self.microbatch)

    @property
    def receive(self) -> Action:
        return Action(self.target, RECEIVES[self.direction], self.microbatch)


class Span(NamedTuple):
    start: float
    end: float
    action: Action


class Replay:
    """The state of a run: where each rank is, what is posted, what has arrived.

    A rank posts transfers without waiting for them; a compute action waits for its own receives.
    A transfer runs only while the same message is at the head of its key's queue at both ends, as
    NCCL may do at its worst: no buffering, and pairing by order alone.

    Args:
        program: one tuple of actions a rank.
        placement: the rank of each stage.
        routes: which stages send to which.
        duration: time of a compute action, >= 0.
        transfer: time of a message on its link, >= 0.
    """

    def __init__(
        self,
        program: Program,
        *,
        placement: Sequence[int],
        routes: Routes,
        duration: Callable[[Action], float] = lambda action: 1.0,
        transfer: Callable[[Message], float] = lambda message: 0.0,
    ) -> None:
        self.program = program
        self.position = [0] * len(program)
        self.spans: list[list[Span]] = [[] for _ in program]
        self.sent: defaultdict[Key, deque[Message]] = defaultdict(deque)
        self.received: defaultdict[Key, deque[Message]] = defaultdict(deque)
        self._placement = placement
        self._ends = routes.transfer_ends(placement)
        self._local = routes.local_sources(placement)
        self._duration = duration
        self._transfer = transfer
        self._made: set[tuple[int, Kind, int]] = set()
        self._arrived: dict[Message, float] = {}
        self._busy_until = [0.0] * len(program)
        self._link_free: defaultdict[tuple[int, int], float] = defaultdict(float)
        self._wakes = [(0.0, rank) for rank in range(len(program))]

    def run(self) -> None:
        """Goes as far as the program can; ``at`` and the queues say whether that was its end."""
        while self._wakes:
            now, rank = heapq.heappop(self._wakes)
            if now >= self._busy_until[rank]:
                self._advance(rank, now)

    def at(self, rank: int) -> Action | None:
        """The action `rank` does next; None at its end."""
        order, position = self.program[rank], self.position[rank]
        return order[position] if position < len(order) else None

    def key(self, message: Message) -> Key:
        source, target = self._placement[message.source], self._placement[message.target]
        return source, target, message.direction

    def missing_values(self, action: Action) -> list[Action]:
        """What `action` needs from its own rank and the rank has not made."""
        missing = [Action(*value) for value in self._inputs(action) if value not in self._made]
        return [self._as_split(a) if a.kind is Kind.B else a for a in missing]

    def missing_messages(self, action: Action) -> list[Message]:
        """What compute action `action` needs from other ranks and has not arrived."""
        return [m for m in self._incoming(action) if m not in self._arrived]

    def messages(self, action: Action) -> list[Message]:
        """What transfer action `action` stands for, in the order in which it is posted."""
        stage, kind, m = action
        direction, others = DIRECTION[kind], self._ends.get((stage, kind), ())
        if kind == SENDS[direction]:
            return [Message(stage, other, direction, m) for other in others]
        return [Message(other, stage, direction, m) for other in others]

    def _as_split(self, backward: Action) -> Action:
        """The I that makes what `backward` makes, if the program has that instead."""
        half = backward._replace(kind=Kind.I)
        return half if any(half in order for order in self.program) else backward

    def _advance(self, rank: int, now: float) -> None:
        while (action := self.at(rank)) is not None:
            if any(value not in self._made for value in self._inputs(action)):
                return
            if action.kind in COMPUTE:
                if all(self._arrived.get(m, math.inf) <= now for m in self._incoming(action)):
                    self._compute(rank, action, now)
                return
            self._post(action, now)
            self.position[rank] += 1

    def _compute(self, rank: int, action: Action, now: float) -> None:
        end = now + self._duration(action)
        self.spans[rank].append(Span(now, end, action))
        self._made.add((action.stage, DIRECTION.get(action.kind, action.kind), action.microbatch))
        self._busy_until[rank] = end
        self.position[rank] += 1
        heapq.heappush(self._wakes, (end, rank))

    def _post(self, action: Action, now: float) -> None:
        queues = self.sent if action.kind in SENDS.values() else self.received
        for message in self.messages(action):
            key = self.key(message)
            queues[key].append(message)
            self._match(key, now)

    def _match(self, key: Key, now: float) -> None:
        sent, received, link = self.sent[key], self.received[key], key[:2]
        while sent and received and sent[0] == received[0]:
            message = sent.popleft()
            received.popleft()
            end = max(now, self._link_free[link]) + self._transfer(message)
            self._link_free[link] = self._arrived[message] = end
            heapq.heappush(self._wakes, (end, key[1]))

    def _inputs(self, action: Action) -> Iterator[tuple[int, Kind, int]]:
        """(stage, direction, microbatch) of what `action` needs from its own rank."""
        stage, kind, m = action
        if kind is Kind.W:
            yield stage, Kind.B, m
            return
        direction = DIRECTION[kind]
        if kind not in COMPUTE:
            if kind == SENDS[direction]:
                yield stage, direction, m
            return
        if direction is Kind.B:
            yield stage, Kind.F, m
        for source in self._local.get((stage, direction), ()):
            yield source, direction, m

    def _incoming(self, action: Action) -> list[Message]:
        kind = RECEIVES.get(action.kind)
        return self.messages(Action(action.stage, kind, action.microbatch)) if kind else []

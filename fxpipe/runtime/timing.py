"""Times the compute actions of steps as they run, as a timeline like the predicted one.

What is timed is an engine at work, and nothing else: not a wait for a message, not a transfer, and
not what the executor does around both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from fxpipe.runtime.collectives import Collectives
from fxpipe.runtime.engine import Engine
from fxpipe.runtime.executor import Executor
from fxpipe.schedule import Action, Kind, Routes, Timeline
from fxpipe.schedule.replay import Replay, Span

Marks: TypeAlias = tuple[Any, Any, Action]
"""What a clock made at the start and at the end of an action."""


class Clock(Protocol):
    """Marks moments now, and says later when they were."""

    def mark(self) -> Any: ...

    def seconds(self, mark: Any) -> float:
        """Since an epoch that all processes share."""
        ...


class CpuClock:
    """Steady within a process. Its zero is the system's time, which machines keep alike by NTP."""

    def __init__(self) -> None:
        self._zero = time.time() - time.perf_counter()

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, mark: float) -> float:
        return self._zero + mark


class CudaClock:
    """Marks moments of the current stream: the host is ahead of what the device computes."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._first = self.mark()
        self._first.synchronize()
        self._zero = time.time()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, mark: torch.cuda.Event) -> float:
        mark.synchronize()
        return self._zero + float(self._first.elapsed_time(mark)) / 1e3


class TimedEngine:
    """Runs another engine and marks when each of its actions starts and ends.

    Args:
        engine: runs the stage.
        actions: those of the stage; a microbatch has one backward among them, B or I.
        clock: makes the marks.
        marks: (start, end, action) is appended for each action.
    """

    def __init__(
        self, engine: Engine, actions: Iterable[Action], clock: Clock, marks: list[Marks]
    ) -> None:
        self._engine, self._clock, self._marks = engine, clock, marks
        self._forward: dict[int, Action] = {}
        self._backward: dict[int, Action] = {}
        self._weight: dict[int, Action] = {}
        kinds = {Kind.F: self._forward, Kind.W: self._weight}
        kinds |= {Kind.B: self._backward, Kind.I: self._backward}
        for action in actions:
            kinds.get(action.kind, {})[action.microbatch] = action

    def forward(self, microbatch: int, inputs: list[Any]) -> Sequence[Any]:
        start = self._clock.mark()
        outputs = self._engine.forward(microbatch, inputs)
        self._marks.append((start, self._clock.mark(), self._forward[microbatch]))
        return outputs

    def backward(
        self,
        microbatch: int,
        gradients: Sequence[Tensor | None],
        later: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        start = self._clock.mark()
        found = self._engine.backward(microbatch, gradients, later)
        self._marks.append((start, self._clock.mark(), self._backward[microbatch]))
        return found

    def drop(self) -> None:
        self._engine.drop()

    def weight(self, microbatch: int) -> None:
        start = self._clock.mark()
        self._engine.weight(microbatch)
        self._marks.append((start, self._clock.mark(), self._weight[microbatch]))


class Stopwatch:
    """Times steps, and knows the timeline of each once all have run.

    Args:
        device: where the stages compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock: Clock = CudaClock() if device.type == "cuda" else CpuClock()
        self._steps: list[_Step] = []

    @contextlib.contextmanager
    def step(
        self,
        executors: Sequence[Executor],
        placement: Sequence[int],
        routes: Routes,
        *,
        goes_on: bool = False,
    ) -> Iterator[None]:
        """Times what the executors run inside. What raises is forgotten.

        Args:
            executors: those of this process, by rank.
            placement: rank of every stage.
            routes: which stages send to which.
            goes_on: this is the rest of a step of which they ran the forwards before.
        """
        marks: dict[int, list[Marks]] = {e.rank: [] for e in executors}
        untimed = [executor.engines for executor in executors]
        for executor, engines in zip(executors, untimed, strict=True):
            executor.use_engines(self._timed(executor, engines, marks[executor.rank]))
        try:
            yield
        finally:
            for executor, engines in zip(executors, untimed, strict=True):
                executor.use_engines(engines)
        self._keep(marks, _Step(tuple(executors), placement, routes), goes_on=goes_on)

    def timelines(self, collectives: Collectives, *, is_whole: bool) -> list[Timeline]:
        """The timeline of each step, from 0. Every process calls it.

        Args:
            collectives: brings the spans of other processes.
            is_whole: there are no other processes. The ranks took turns then, and when they ran
                says nothing; so the actions are placed anew, each as long as it took, as if every
                rank had a processor of its own and transfers took no time.
        """
        if is_whole:
            return [step.replay() for step in self._steps]
        (rank,) = collectives.held
        steps_by_rank = collectives.gather({rank: [step.spans[rank] for step in self._steps]})
        return [_from_zero(ranks) for ranks in zip(*steps_by_rank, strict=True)]

    def _keep(self, marks: Mapping[int, Sequence[Marks]], step: _Step, *, goes_on: bool) -> None:
        begun = [s for s in self._steps if s.executors == step.executors] if goes_on else []
        if begun:
            step = begun[-1]
        else:
            self._steps.append(step)
        seconds = self._clock.seconds
        for rank, found in marks.items():
            spans = [Span(seconds(start), seconds(end), action) for start, end, action in found]
            step.spans.setdefault(rank, []).extend(spans)

    def _timed(
        self, executor: Executor, engines: Mapping[int, Engine], marks: list[Marks]
    ) -> dict[int, Engine]:
        return {
            stage: TimedEngine(
                engine, [a for a in executor.program if a.stage == stage], self._clock, marks
            )
            for stage, engine in engines.items()
        }


@dataclasses.dataclass(frozen=True)
class _Step:
    """The spans of the ranks of this process, and what it takes to replay them."""

    executors: tuple[Executor, ...]
    placement: Sequence[int]
    routes: Routes
    spans: dict[int, list[Span]] = dataclasses.field(default_factory=dict)

    def replay(self) -> Timeline:
        took = {action: end - start for rank in self.spans.values() for start, end, action in rank}
        replay = Replay(
            tuple(executor.program for executor in self.executors),
            placement=self.placement,
            routes=self.routes,
            duration=lambda action: took.get(action, 0.0),
        )
        replay.run()
        # a step whose forwards alone ran inside has no other spans
        return Timeline(tuple(tuple(s for s in rank if s.action in took) for rank in replay.spans))


def _from_zero(ranks: Sequence[Sequence[Span]]) -> Timeline:
    """The spans of one step, of all ranks, on a clock that starts with the first of them."""
    zero = min((rank[0].start for rank in ranks if rank), default=0.0)
    return Timeline(
        tuple(tuple(Span(a - zero, b - zero, action) for a, b, action in rank) for rank in ranks)
    )

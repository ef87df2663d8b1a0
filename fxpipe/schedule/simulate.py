"""When each action of a program runs, and what that costs in idle time and held activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from fxpipe.errors import CostError
from fxpipe.schedule.actions import Action, Kind
from fxpipe.schedule.orders import Program, Routes
from fxpipe.schedule.replay import Message, Replay, Span
from fxpipe.schedule.stuck import deadlock, smallest_stuck_set

PerStage: TypeAlias = float | Sequence[float]
"""One number for all stages, or one a stage."""


@dataclass(frozen=True)
class Costs:
    """Time of each action for one microbatch, >= 0, in any unit: seconds, or ticks of a drawing.

    Args:
        forward: F.
        backward: B, or I and W together.
        weight: W, at most `backward`; I takes the rest. None: half of `backward`.
        latency: each message, in both directions.
        transfer: added to the latency of the messages from a stage to another, (from, to); pairs
            that are not in it add nothing.

    Raises:
        CostError: a time is negative.
    """

    forward: PerStage = 1.0
    backward: PerStage = 1.0
    weight: PerStage | None = None
    latency: float = 0.0
    transfer: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, times in (
            ("forward", self.forward),
            ("backward", self.backward),
            ("weight", self.weight or 0.0),
            ("latency", self.latency),
            ("transfer", tuple(self.transfer.values())),
        ):
            for time in times if isinstance(times, Sequence) else (times,):
                if not time >= 0:
                    raise CostError(f"a {name} takes a time of {time}")

    def of_action(self, action: Action) -> float:
        """Time of a compute action.

        Raises:
            CostError: the costs are given per stage, and not for this one; or W exceeds `backward`.
        """
        if action.kind is Kind.F:
            return _at(self.forward, action)
        backward = _at(self.backward, action)
        if action.kind is Kind.B:
            return backward
        weight = backward / 2 if self.weight is None else _at(self.weight, action)
        if weight > backward:
            raise CostError(f"the W of {action} takes {weight} of a backward of {backward}")
        return weight if action.kind is Kind.W else backward - weight

    def of_message(self, message: Message) -> float:
        return self.latency + self.transfer.get((message.source, message.target), 0.0)


@dataclass(frozen=True)
class Timeline:
    """A program placed in time.

    The two bubbles are shares of rank time spent idle, over two periods. Papers mix them: with a
    barrier at the end of a step, as clipping needs, a step takes the makespan; without one, a rank
    starts its next step alone, and a step takes the longest span of a rank.

    Args:
        spans: the compute actions of each rank, in order.
    """

    spans: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """First start to last end, over all ranks."""
        ends = [span.end for rank in self.spans for span in rank]
        return max(ends) - min(span.start for rank in self.spans for span in rank) if ends else 0.0

    @property
    def busy(self) -> tuple[float, ...]:
        """Time each rank computes."""
        return tuple(sum(end - start for start, end, _ in rank) for rank in self.spans)

    @property
    def bubble(self) -> float:
        """Idle share of ranks x makespan, 0..1."""
        return self._idle_share(self.makespan)

    @property
    def span_bubble(self) -> float:
        """Idle share of ranks x the longest own first start to own last end, 0..1."""
        return self._idle_share(max((r[-1].end - r[0].start for r in self.spans if r), default=0.0))

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """The most activations each rank holds at once, one a stage and microbatch.

        Held from the start of F to the end of the last action that may read them: B, W if the
        backward is split, F itself if there is no backward.
        """
        return tuple(_peak([span.action for span in rank]) for rank in self.spans)

    def _idle_share(self, period: float) -> float:
        if not period:
            return 0.0
        # rounding may make the sum of spans a little longer than the period
        return max(0.0, 1 - sum(self.busy) / (len(self.spans) * period))


def simulate(
    program: Program, *, placement: Sequence[int], routes: Routes, costs: Costs
) -> Timeline:
    """Starts each action as early as its rank and its inputs allow.

    A message leaves once it is sent, its receive is posted, and its link is free; so a `prefetch`
    of 0 pays for the latency of every transfer. A link is a directed pair of ranks.

    Args:
        program: one tuple of actions a rank, as ``add_transfers`` makes it.
        placement: the rank of each stage.
        routes: which stages send to which.
        costs: times of actions and messages.

    Raises:
        ScheduleError: the program deadlocks.
        CostError: a stage of the program has no cost.
    """
    replay = Replay(
        program,
        placement=placement,
        routes=routes,
        duration=costs.of_action,
        transfer=costs.of_message,
    )
    replay.run()
    if smallest_stuck_set(replay):
        raise deadlock(replay)
    return Timeline(tuple(tuple(spans) for spans in replay.spans))


def _at(times: PerStage, action: Action) -> float:
    if not isinstance(times, Sequence):
        return times
    if action.stage >= len(times):
        raise CostError(f"{action} has no cost: costs are given for {len(times)} stages")
    return times[action.stage]


def _peak(actions: Sequence[Action]) -> int:
    last = {(a.stage, a.microbatch): i for i, a in enumerate(actions)}
    held = peak = 0
    for i, action in enumerate(actions):
        held += action.kind is Kind.F
        peak = max(peak, held)
        held -= last[action.stage, action.microbatch] == i
    return peak

"""Schedules, routes and programs as plain values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

from fxpipe.errors import ScheduleError
from fxpipe.schedule.actions import RECEIVES, SENDS, Action, Kind

Program: TypeAlias = tuple[tuple[Action, ...], ...]
"""What each rank does, in order, transfers included."""

StagesOf: TypeAlias = dict[tuple[int, Kind], tuple[int, ...]]
"""Per (stage, kind) the stages at the other end, ascending; without an entry there are none."""


@dataclass(frozen=True)
class Schedule:
    """In which order each rank computes. Transfers are not in it: ``add_transfers`` derives them.

    Args:
        name: as printed in reports.
        orders: compute actions only, one tuple a rank.
        placement: the rank of each stage.
        microbatches: M; the actions name 0..M-1.
    """

    name: str
    orders: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...]
    microbatches: int

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def ranks(self) -> int:
        return len(self.orders)

    @property
    def has_backward(self) -> bool:
        return any(action.kind is not Kind.F for order in self.orders for action in order)


@dataclass(frozen=True)
class Routes:
    """Between which stages tensors go: (from, to) pairs that carry at least one, ascending.

    Gradients have routes of their own: that of a skip edge may come back over its other consumers,
    and a stage that trains nothing sends none.

    Args:
        forward: activations; from an earlier stage to a later one.
        backward: gradients; from a later stage to an earlier one.

    Raises:
        ScheduleError: the pairs are out of order, repeat, or lead the wrong way.
    """

    forward: tuple[tuple[int, int], ...]
    backward: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        for name, pairs, sign in (("forward", self.forward, 1), ("backward", self.backward, -1)):
            if list(pairs) != sorted(set(pairs)):
                raise ScheduleError(f"{name} routes are not in ascending order: {pairs}")
            for source, target in pairs:
                if min(source, target) < 0 or (target - source) * sign <= 0:
                    raise ScheduleError(f"no {name} route leads from stage {source} to {target}")

    @classmethod
    def chain(cls, stages: int) -> Self:
        """Neighbours only, both ways: a model whose stages read nothing but the stage before."""
        return cls(
            tuple((s, s + 1) for s in range(stages - 1)),
            tuple((s + 1, s) for s in range(stages - 1)),
        )

    def transfer_ends(self, placement: Sequence[int]) -> StagesOf:
        """The other ends of each transfer action, by its stage and kind (SEND_x, RECV_x).

        >>> Routes(((0, 2), (1, 2)), ()).transfer_ends(placement=(0, 0, 1))[2, Kind.RECV_F]
        (0, 1)

        Args:
            placement: the rank of each stage. A route within one rank needs no transfer.

        Raises:
            ScheduleError: a route names a stage that is placed nowhere.
        """
        ends: defaultdict[tuple[int, Kind], list[int]] = defaultdict(list)
        for source, target, direction in self._ways(placement):
            if placement[source] != placement[target]:
                ends[source, SENDS[direction]].append(target)
                ends[target, RECEIVES[direction]].append(source)
        return {end: tuple(stages) for end, stages in ends.items()}

    def local_sources(self, placement: Sequence[int]) -> StagesOf:
        """The stages of the same rank that a stage gets values from, by stage and direction."""
        sources: defaultdict[tuple[int, Kind], list[int]] = defaultdict(list)
        for source, target, direction in self._ways(placement):
            if placement[source] == placement[target]:
                sources[target, direction].append(source)
        return {key: tuple(stages) for key, stages in sources.items()}

    def _ways(self, placement: Sequence[int]) -> list[tuple[int, int, Kind]]:
        ways = [(*pair, Kind.F) for pair in self.forward]
        ways += [(*pair, Kind.B) for pair in self.backward]
        for source, target, _ in ways:
            if max(source, target) >= len(placement):
                raise ScheduleError(
                    f"the route from stage {source} to {target} names a stage that no rank has",
                    hint=f"the placement has {len(placement)} stages",
                )
        return ways

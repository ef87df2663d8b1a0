"""Finds the loops in a flat list of actions, for programs short enough to read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fxpipe.schedule.actions import Action

# A loop of two turns reads worse than its actions.
_FEWEST_TURNS = 3
# The steady period of a schedule: at most seven actions a chunk, transfers included.
_LONGEST_BODY = 64


@dataclass(frozen=True)
class Loop:
    """`body`, `count` times over; each turn adds `shift` to every microbatch."""

    body: tuple[Action, ...]
    count: int
    shift: int

    def __str__(self) -> str:
        return f"{self.count} x [{' '.join(map(str, self.body))}] {self.shift:+}"


Rolled: TypeAlias = list[Action | Loop]


def roll(actions: Sequence[Action]) -> Rolled:
    """Replaces runs that repeat with a constant microbatch shift by loops, longest saving first.

    >>> from fxpipe.schedule.one_f_one_b import one_f_one_b
    >>> for item in roll(one_f_one_b(4, 64).orders[1]):
    ...     print(item)
    3 x [1F0] +1
    61 x [1B0 1F3] +1
    3 x [1B61] +1

    Greedy from the front: not the shortest program possible, but the same for every M once the
    pipeline fills. ``expand`` is the inverse.
    """
    rolled: Rolled = []
    i = 0
    while i < len(actions):
        loop = _loop_at(actions, i)
        rolled.append(loop or actions[i])
        i += len(loop.body) * loop.count if loop else 1
    return rolled


def expand(rolled: Iterable[Action | Loop]) -> list[Action]:
    """The flat list again: ``expand(roll(actions)) == list(actions)``."""
    actions: list[Action] = []
    for item in rolled:
        if isinstance(item, Loop):
            for turn in range(item.count):
                actions += [_shifted(action, turn * item.shift) for action in item.body]
        else:
            actions.append(item)
    return actions


def _loop_at(actions: Sequence[Action], i: int) -> Loop | None:
    """The loop from `i` on that saves most lines; the shortest body among equals."""
    best: Loop | None = None
    saved = 0
    for period in range(1, min(_LONGEST_BODY, (len(actions) - i) // _FEWEST_TURNS) + 1):
        shift = actions[i + period].microbatch - actions[i].microbatch
        # A list is periodic where each item is the one a period before it, shifted.
        j = i + period
        while j < len(actions) and actions[j] == _shifted(actions[j - period], shift):
            j += 1
        count = (j - i) // period
        if shift and count >= _FEWEST_TURNS and period * (count - 1) > saved:
            best, saved = Loop(tuple(actions[i : i + period]), count, shift), period * (count - 1)
    return best


def _shifted(action: Action, shift: int) -> Action:
    return Action(action.stage, action.kind, action.microbatch + shift)

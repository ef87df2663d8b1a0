"""Cuts a chain of items into contiguous stages; exact.

**Terms.** A *place* is an index before which a cut is allowed, with 0 and the end of the chain
added. The *load* of a stage is the cost of its items and of the cuts at both of its ends. The
*bottleneck* is the largest load.

**Method.** The load of the stage between two places, from `i` to `j`, is ``end[j] - start[i]``,
with ``end[j] = sum(costs[:j]) + cut[j]`` and ``start[i] = sum(costs[:i]) - cut[i]``. So whether a
stage that ends at `j` keeps under a limit depends on its start only through ``start[i]``, and one
running maximum over the starts in reach answers it for all `j` in one sweep. Bisection over the
limit finds the bottleneck. A greedy probe would not: with cuts that cost, a longer stage can have
a smaller load.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence

from fxpipe.errors import CostError, OptionError

_INFINITY = math.inf


def cut_chain(
    costs: Sequence[float], stages: int, *, cut_costs: Sequence[float | None]
) -> tuple[int, ...]:
    """Where to cut so that the bottleneck is smallest, then the sum of the costs of the cuts.

    Among equals the loads are even: each stage, from the last to the first, starts as close as
    it can to its share of what is left.

    >>> cut_chain([1, 1, 1, 1, 2], 3, cut_costs=[0] * 5)
    (2, 4)
    >>> cut_chain([1, 1, 1, 1, 2], 3, cut_costs=[0, 0, None, 0, 0])
    (1, 4)

    Args:
        costs: of the items, not negative. Integers are exact, floats to 2^-62 of the sum of all.
        stages: S >= 1. Each stage holds at least one item, whatever it costs.
        cut_costs: for each item what a cut before it adds to both stages it parts, in the units of
            `costs`; None where no cut is allowed. The first counts for nothing.

    Returns:
        Index of the first item of stages 1 to S-1, ascending.

    Raises:
        OptionError: there are fewer than S-1 places to cut, or no item at all.
        CostError: a cost is negative or not finite.

    Source: bisection over a probe: Pinar and Aykanat, Fast optimal load balancing algorithms for
    1D partitioning, JPDC 2004. The probe is changed, as above, for cuts that cost.
    """
    assert len(costs) == len(cut_costs), "one cut cost an item"
    inner = [i for i, cut in enumerate(cut_costs) if i > 0 and cut is not None]
    _check_count(stages, items=len(costs), places=len(inner))
    cuts = [cut_costs[i] or 0 for i in inner]
    whole = _as_integers([*costs, *cuts])
    prefix = [0, *itertools.accumulate(whole[: len(costs)])]
    places = [0, *inner, len(costs)]
    chain = _Chain([prefix[i] for i in places], [0, *whole[len(costs) :], 0])
    return tuple(places[i] for i in chain.solve(stages))


def _check_count(stages: int, *, items: int, places: int) -> None:
    if stages < 1:
        raise OptionError(f"a model has at least one stage, not {stages}", at=f"stages={stages}")
    if items == 0:
        raise OptionError("there is nothing to cut: the chain has no items", at=f"stages={stages}")
    if stages - 1 > places:
        raise OptionError(
            f"{stages} stages need {stages - 1} cuts, but there are {places} places to cut",
            at=f"stages={stages}",
            hint=f"use stages <= {places + 1}",
        )


def _as_integers(values: Sequence[float]) -> list[int]:
    """The values in one integer unit: unchanged if they are integers, else 2^-62 of their sum.

    Integers, so that sums do not depend on their order, and equal loads compare as equal.
    """
    for value in values:
        if not 0 <= value < _INFINITY:
            raise CostError(f"a cost is a finite number of at least 0, not {value}")
    if all(value == int(value) for value in values):
        return [int(value) for value in values]
    exponent = 62 - math.frexp(math.fsum(values))[1]
    return [round(math.ldexp(value, exponent)) for value in values]


class _Chain:
    """The chain at its places: only where a cut may stand matters.

    Args:
        prefix: cost of all items before each place; the last entry is the cost of all items.
        cuts: cost of a cut at each place, 0 at both ends.
    """

    def __init__(self, prefix: list[int], cuts: list[int]) -> None:
        self.prefix, self.cuts = prefix, cuts
        self.start = [p - c for p, c in zip(prefix, cuts, strict=True)]
        self.end = [p + c for p, c in zip(prefix, cuts, strict=True)]

    def solve(self, stages: int) -> list[int]:
        """Places where stages 1 to S-1 start."""
        limit = self.bottleneck(stages)
        return self.even_cuts(limit, self.cheapest_cuts(limit, stages))

    def bottleneck(self, stages: int) -> int:
        """The smallest limit that S stages can keep."""
        low, high = -(-self.prefix[-1] // stages), self.prefix[-1] + 2 * max(self.cuts)
        while low < high:
            middle = (low + high) // 2
            if self.fits(middle, stages):
                high = middle
            else:
                low = middle + 1
        return low

    def fits(self, limit: int, stages: int) -> bool:
        """Whether S stages can each keep a load of at most `limit`."""
        starts = self.start[1:]
        needed = [end - limit for end in self.end[1:]]  # a stage that ends here starts no lower
        reach: list[float] = [-_INFINITY] * len(self.start)  # start of the places in reach
        reach[0] = self.start[0]
        for _ in range(stages):
            best = itertools.accumulate(reach, max)
            stops = zip(best, needed, starts, strict=False)
            reach = [-_INFINITY]
            reach += [start if b >= need else -_INFINITY for b, need, start in stops]
        return reach[-1] > -_INFINITY

    def cheapest_cuts(self, limit: int, stages: int) -> list[list[float]]:
        """The least sum of cuts with which k stages end at each place within `limit`; k = 0..S.

        Infinity where they cannot.
        """
        sums: list[list[float]] = [[0, *[_INFINITY] * (len(self.start) - 1)]]
        for _ in range(stages):
            front = _Front()
            row: list[float] = []
            for place, before in enumerate(sums[-1]):
                row.append(front.least(self.end[place] - limit) + self.cuts[place])
                if before < _INFINITY:
                    front.add(self.start[place], before)
            sums.append(row)
        return sums

    def even_cuts(self, limit: int, sums: list[list[float]]) -> list[int]:
        """Follows `sums` back from the end; of places that are as good, takes the most even."""
        found: list[int] = []
        stop = len(self.start) - 1
        for stage in range(len(sums) - 2, 0, -1):
            before, target = sums[stage], sums[stage + 1][stop] - self.cuts[stop]
            equals = [
                place
                for place in range(stop)
                if before[place] == target and self.end[stop] - self.start[place] <= limit
            ]
            share = self.prefix[stop] * stage
            stop = min(equals, key=lambda p: abs(self.prefix[p] * (stage + 1) - share))
            found.append(stop)
        return found[::-1]


class _Front:
    """Places passed so far, without those that another beats: a later start and a smaller sum.

    Both lists ascend, so the least sum over all starts from a bound on is the first from there on.
    """

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.sums: list[float] = []

    def least(self, start: int) -> float:
        """The least sum among places that start at `start` or later."""
        i = bisect.bisect_left(self.starts, start)
        return self.sums[i] if i < len(self.sums) else _INFINITY

    def add(self, start: int, total: float) -> None:
        if self.least(start) <= total:
            return
        stop = bisect.bisect_right(self.starts, start)
        first = bisect.bisect_left(self.sums, total, 0, stop)
        self.starts[first:stop] = [start]
        self.sums[first:stop] = [total]

import itertools
import time
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.balance.chain import cut_chain
from fxpipe.errors import CostError, OptionError

Cuts = Sequence[float | None]


def loads(costs: Sequence[float], starts: Sequence[int], cut_costs: Cuts) -> list[float]:
    bounds = [0, *starts, len(costs)]
    cuts = [0, *(cut_costs[i] for i in starts), 0]
    return [
        sum(costs[a:b]) + cuts[k] + cuts[k + 1]
        for k, (a, b) in enumerate(itertools.pairwise(bounds))
    ]


def judge(costs: Sequence[float], starts: Sequence[int], cut_costs: Cuts) -> tuple[float, float]:
    return max(loads(costs, starts, cut_costs)), sum(cut_costs[i] for i in starts)


def all_starts(stages: int, cut_costs: Cuts) -> Iterator[tuple[int, ...]]:
    allowed = [i for i in range(1, len(cut_costs)) if cut_costs[i] is not None]
    return itertools.combinations(allowed, stages - 1)


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[int], int, list[int | None]]:
    size = draw(st.integers(1, 9))
    costs = draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
    cut = st.one_of(st.none(), st.integers(0, 9))
    cuts = draw(st.lists(cut, min_size=size, max_size=size))
    allowed = sum(c is not None for c in cuts[1:])
    return costs, draw(st.integers(1, allowed + 1)), cuts


@given(chains())
def test_no_other_cuts_have_a_smaller_bottleneck_or_cost_less(chain):
    costs, stages, cuts = chain
    starts = cut_chain(costs, stages, cut_costs=cuts)
    assert starts in set(all_starts(stages, cuts))
    assert judge(costs, starts, cuts) == min(
        judge(costs, other, cuts) for other in all_starts(stages, cuts)
    )


@given(chains())
def test_the_unit_of_the_costs_does_not_matter(chain):
    costs, stages, cuts = chain
    scaled = [c / 1024 for c in costs]
    scaled_cuts = [None if c is None else c / 1024 for c in cuts]
    assert cut_chain(scaled, stages, cut_costs=scaled_cuts) == cut_chain(
        costs, stages, cut_costs=cuts
    )


def test_a_longer_stage_may_have_the_smaller_load():
    # a greedy probe under 6 stops before the cut that costs 9, and then needs a third stage
    assert cut_chain([4, 1, 1, 5], 2, cut_costs=[0, 9, 0, 0]) == (2,)


def test_stages_that_do_not_matter_for_the_bottleneck_are_even():
    assert cut_chain([2] * 6 + [9], 4, cut_costs=[0] * 7) == (2, 4, 6)


def test_a_cheaper_cut_wins_over_a_more_even_one():
    assert cut_chain([1, 1, 1, 1, 9], 3, cut_costs=[0, 0, 1, 1, 0]) == (1, 4)


def test_equal_floats_are_cut_into_equal_stages():
    assert cut_chain([0.1] * 12, 4, cut_costs=[0.0] * 12) == (3, 6, 9)


def test_items_without_cost_still_fill_stages():
    starts = cut_chain([0, 0, 0], 3, cut_costs=[0, 0, 0])
    assert starts == (1, 2)


def test_one_stage_needs_no_cut():
    assert cut_chain([3, 4], 1, cut_costs=[None, None]) == ()


def test_too_many_stages_are_reported_with_the_number_possible():
    with pytest.raises(OptionError, match="4 stages need 3 cuts, but there are 2 places") as caught:
        cut_chain([1] * 4, 4, cut_costs=[0, 0, None, 0])
    assert caught.value.hint == "use stages <= 3"


@pytest.mark.parametrize(("costs", "stages"), [([1, 2], 0), ([], 1)])
def test_no_stage_and_no_item_are_reported(costs, stages):
    with pytest.raises(OptionError):
        cut_chain(costs, stages, cut_costs=[0] * len(costs))


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_a_cost_that_is_no_amount_is_reported(cost):
    with pytest.raises(CostError, match=f"not {cost}"):
        cut_chain([1.0, cost], 1, cut_costs=[0, 0])


def test_a_model_of_five_thousand_nodes_is_cut_in_seconds():
    costs = [1e-6 * (1 + i * i % 17) for i in range(5000)]
    cuts = [None if i % 7 == 3 else 1e-7 * (i % 5) for i in range(5000)]
    began = time.process_time()
    starts = cut_chain(costs, 16, cut_costs=cuts)
    assert time.process_time() - began < 10
    assert max(loads(costs, starts, cuts)) < 1.01 * sum(costs) / 16

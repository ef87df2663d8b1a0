"""What the papers say of each schedule, for all sizes: S = 1, M = 1 and M < S included."""

from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fxpipe.schedule import (
    SCHEDULES,
    Costs,
    Kind,
    Routes,
    add_transfers,
    expand,
    make_schedule,
    roll,
    simulate,
    verify,
)
from fxpipe.schedule.actions import Action

sizes = st.tuples(st.integers(1, 9), st.integers(1, 20))
prefetches = st.integers(0, 5)
# whole numbers, so that sums are exact
times = st.tuples(st.integers(1, 9), st.integers(1, 9))
names = st.sampled_from(SCHEDULES)
every_name = pytest.mark.parametrize("name", SCHEDULES)


def timeline(name, S, M, *, costs=Costs(), prefetch=1, forward_only=False):  # noqa: B008 (frozen)
    schedule = make_schedule(name, stages=S, microbatches=M, forward_only=forward_only)
    routes = Routes.chain(S)
    program = add_transfers(schedule, routes, prefetch=prefetch)
    return simulate(program, placement=schedule.placement, routes=routes, costs=costs)


@every_name
@given(sizes)
def test_every_microbatch_runs_forward_and_backward_once_on_every_stage(name, sm):
    S, M = sm
    schedule = make_schedule(name, stages=S, microbatches=M)
    wanted = {Action(s, k, m) for s in range(S) for k in (Kind.F, Kind.B) for m in range(M)}
    assert Counter(a for order in schedule.orders for a in order) == Counter(wanted)
    assert all(a.stage == rank for rank, order in enumerate(schedule.orders) for a in order)


@every_name
@given(sizes)
def test_microbatches_run_in_ascending_order_forward_and_backward(name, sm):
    S, M = sm
    for order in make_schedule(name, stages=S, microbatches=M).orders:
        for kind in (Kind.F, Kind.B):
            assert [a.microbatch for a in order if a.kind is kind] == list(range(M))


@every_name
@given(sizes, times, prefetches)
@example((1, 1), (1, 1), 0)
@example((9, 1), (1, 2), 0)
@example((9, 4), (2, 1), 1)
def test_no_deadlock_and_the_makespan_is_the_papers(name, sm, ts, prefetch):
    (S, M), (forward, backward) = sm, ts
    placed = timeline(name, S, M, costs=Costs(forward, backward), prefetch=prefetch)
    assert placed.makespan == (M + S - 1) * (forward + backward)
    assert placed.busy == (M * (forward + backward),) * S


@every_name
@given(sizes, times)
def test_both_bubbles_are_the_papers(name, sm, ts):
    S, M = sm
    placed = timeline(name, S, M, costs=Costs(*ts))
    assert placed.bubble == pytest.approx((S - 1) / (M + S - 1))
    # rank 0 starts first and ends last
    assert placed.span_bubble == pytest.approx((S - 1) / (M + S - 1))


@given(sizes)
def test_under_1f1b_rank_r_holds_at_most_stages_minus_r_activations(sm):
    S, M = sm
    assert timeline("1F1B", S, M).peak_in_flight == tuple(min(S - r, M) for r in range(S))


@given(sizes)
def test_under_gpipe_every_rank_holds_the_activations_of_all_microbatches(sm):
    S, M = sm
    assert timeline("GPipe", S, M).peak_in_flight == (M,) * S


@given(sizes)
def test_1f1b_warms_up_with_a_forward_for_each_later_stage_and_then_alternates(sm):
    S, M = sm
    for rank, order in enumerate(make_schedule("1F1B", stages=S, microbatches=M).orders):
        kinds = "".join(a.kind for a in order)
        warmup = min(S - 1 - rank, M)
        assert kinds == "F" * warmup + "FB" * (M - warmup) + "B" * warmup


@every_name
@given(sizes, times)
def test_forward_only_takes_the_papers_forward_half_and_holds_one_activation(name, sm, ts):
    S, M = sm
    placed = timeline(name, S, M, costs=Costs(*ts), forward_only=True)
    assert placed.makespan == (M + S - 1) * ts[0]
    assert placed.bubble == pytest.approx((S - 1) / (M + S - 1))
    assert placed.span_bubble == pytest.approx(0)
    assert placed.peak_in_flight == (1,) * S


@given(names, st.integers(1, 9), times, st.integers(0, 5), prefetches)
def test_one_microbatch_pays_every_transfer_in_full(name, S, ts, latency, prefetch):
    costs = Costs(*ts, latency=latency)
    makespan = timeline(name, S, 1, costs=costs, prefetch=prefetch).makespan
    assert makespan == S * sum(ts) + 2 * (S - 1) * latency


@given(names, sizes, st.booleans(), prefetches)
def test_the_program_of_every_schedule_passes_verify(name, sm, forward_only, prefetch):
    S, M = sm
    schedule = make_schedule(name, stages=S, microbatches=M, forward_only=forward_only)
    routes = Routes.chain(S)
    if forward_only:
        routes = Routes(routes.forward, ())
    program = add_transfers(schedule, routes, prefetch=prefetch)
    verify(
        program,
        placement=schedule.placement,
        routes=routes,
        microbatches=M,
        forward_only=forward_only,
    )


@given(names, st.integers(1, 6), st.integers(1, 40), st.booleans(), prefetches)
def test_a_program_with_transfers_is_itself_after_roll_and_expand(name, S, M, forward, prefetch):
    schedule = make_schedule(name, stages=S, microbatches=M, forward_only=forward)
    for order in add_transfers(schedule, Routes.chain(S), prefetch=prefetch):
        assert expand(roll(order)) == list(order)


@given(names, st.integers(1, 5), st.integers(20, 40), st.integers(0, 2))
def test_a_rolled_program_is_no_longer_for_more_microbatches(name, S, M, prefetch):
    def lengths(microbatches):
        schedule = make_schedule(name, stages=S, microbatches=microbatches)
        return [len(roll(o)) for o in add_transfers(schedule, Routes.chain(S), prefetch=prefetch)]

    assert lengths(M) == lengths(M + 1)

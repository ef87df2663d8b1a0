import pytest

from fxpipe.errors import CostError, ScheduleError
from fxpipe.schedule import Costs, Routes, Schedule, add_transfers, make_schedule, simulate
from fxpipe.schedule.actions import Action


def run(*orders, placement=None, routes=None, costs=Costs(), prefetch=9):  # noqa: B008 (frozen)
    """Simulates orders given as text, with the transfers of `routes` (default: a chain)."""
    placement = placement or tuple(range(len(orders)))
    routes = routes or Routes.chain(len(placement))
    parsed = tuple(tuple(map(Action.parse, order.split())) for order in orders)
    program = add_transfers(Schedule("by hand", parsed, placement, 1), routes, prefetch=prefetch)
    return simulate(program, placement=placement, routes=routes, costs=costs)


def starts(timeline, rank):
    return {str(span.action): span.start for span in timeline.spans[rank]}


def test_costs_may_differ_by_stage():
    timeline = run("0F0 0B0", "1F0 1B0", costs=Costs(forward=(1, 2), backward=(3, 4)))
    assert starts(timeline, 0) == {"0F0": 0, "0B0": 7}
    assert starts(timeline, 1) == {"1F0": 1, "1B0": 3}
    assert timeline.makespan == 10
    assert timeline.busy == (4, 6)
    assert timeline.bubble == pytest.approx(10 / 20)


def test_the_two_bubbles_differ_where_a_rank_may_start_over_before_the_others():
    timeline = run("0F0 0F1", "1F0 1F1")
    assert timeline.bubble == pytest.approx(2 / 6)
    assert timeline.span_bubble == 0


def test_a_split_backward_sends_its_gradient_before_the_weight_half():
    costs = Costs(forward=1, backward=5, weight=2)
    timeline = run("0F0 0I0 0W0", "1F0 1I0 1W0", costs=costs)
    assert starts(timeline, 1) == {"1F0": 1, "1I0": 2, "1W0": 5}
    assert starts(timeline, 0) == {"0F0": 0, "0I0": 5, "0W0": 8}
    assert timeline.makespan == 10


def test_a_split_backward_takes_as_long_as_a_whole_one_and_halves_it_by_default():
    timeline = run("0F0 0I0 0W0", costs=Costs(backward=3))
    assert starts(timeline, 0) == {"0F0": 0, "0I0": 1, "0W0": 2.5}
    assert timeline.makespan == 4


def test_activations_are_held_until_the_weight_half_has_run():
    assert run("0F0 0I0 0F1 0I1 0F2 0I2 0W0 0W1 0W2").peak_in_flight == (3,)
    assert run("0F0 0I0 0W0 0F1 0I1 0W1 0F2 0I2 0W2").peak_in_flight == (1,)


def test_every_stage_of_a_rank_counts_towards_its_peak():
    timeline = run("0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1", placement=(0, 0))
    assert timeline.peak_in_flight == (4,)


def test_latency_is_hidden_by_a_receive_posted_ahead():
    orders = ("0F0 0F1 0F2", "1F0 1F1 1F2")
    costs = Costs(latency=1)
    assert starts(run(*orders, costs=costs, prefetch=1), 1) == {"1F0": 2, "1F1": 3, "1F2": 4}
    assert starts(run(*orders, costs=costs, prefetch=0), 1) == {"1F0": 2, "1F1": 4, "1F2": 6}


def test_a_link_carries_one_message_at_a_time():
    routes = Routes(((0, 1), (0, 2)), ())
    costs = Costs(transfer={(0, 1): 3, (0, 2): 2}, latency=1)
    timeline = run("0F0", "1F0 2F0", placement=(0, 1, 1), routes=routes, costs=costs)
    assert starts(timeline, 1) == {"1F0": 5, "2F0": 8}


def test_links_to_different_ranks_carry_at_the_same_time():
    routes = Routes(((0, 1), (0, 2)), ())
    costs = Costs(transfer={(0, 1): 3, (0, 2): 2})
    timeline = run("0F0", "1F0", "2F0", routes=routes, costs=costs)
    assert starts(timeline, 1) == {"1F0": 4}
    assert starts(timeline, 2) == {"2F0": 3}


def test_a_skip_edge_is_waited_for_like_any_other():
    routes = Routes(((0, 1), (0, 3), (1, 2), (2, 3)), ())
    costs = Costs(transfer={(0, 3): 10})
    timeline = run("0F0", "1F0", "2F0", "3F0", routes=routes, costs=costs)
    assert starts(timeline, 3) == {"3F0": 11}


def test_stages_without_a_route_between_them_do_not_wait_for_each_other():
    timeline = run("0F0 0B0", "1F0 1B0", routes=Routes(((0, 1),), ()))
    assert starts(timeline, 0) == {"0F0": 0, "0B0": 1}


def test_a_program_that_deadlocks_has_no_timeline():
    with pytest.raises(ScheduleError, match="deadlocks") as caught:
        run("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", prefetch=0)
    assert "rank 0 waits at 0B0" in caught.value.at


def test_rounding_makes_no_negative_bubble():
    orders = (" ".join(f"{stage}F{m}" for m in range(11)) for stage in range(2))
    # neither rank ever waits, but the busy times add up to more than two spans, by a bit
    assert run(*orders, costs=Costs(forward=0.1)).span_bubble == 0


def test_all_costs_zero_has_no_bubble():
    timeline = run("0F0 0B0", costs=Costs(forward=0, backward=0))
    assert (timeline.makespan, timeline.bubble, timeline.span_bubble) == (0, 0, 0)


@pytest.mark.parametrize(
    ("costs", "problem"),
    [
        ({"forward": -1}, "forward takes a time of -1"),
        ({"backward": (1, float("nan"))}, "backward takes a time of nan"),
        ({"weight": -2}, "weight takes a time of -2"),
        ({"latency": -1}, "latency takes a time of -1"),
        ({"transfer": {(0, 1): -1}}, "transfer takes a time of -1"),
    ],
)
def test_times_that_are_not_times_are_refused(costs, problem):
    with pytest.raises(CostError, match=problem):
        Costs(**costs)


def test_a_stage_without_a_cost_is_reported():
    schedule = make_schedule("GPipe", stages=3, microbatches=1)
    program = add_transfers(schedule, Routes.chain(3))
    with pytest.raises(CostError, match="2F0 has no cost: costs are given for 2 stages"):
        simulate(
            program,
            placement=schedule.placement,
            routes=Routes.chain(3),
            costs=Costs(forward=(1, 1)),
        )


def test_a_weight_half_longer_than_the_whole_backward_is_reported():
    with pytest.raises(CostError, match="the W of 0I0 takes 3 of a backward of 2"):
        run("0F0 0I0 0W0", costs=Costs(backward=2, weight=3))

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.schedule import Routes, make_schedule
from fxpipe.schedule.actions import Kind


def test_a_schedule_knows_its_sizes():
    schedule = make_schedule("GPipe", stages=3, microbatches=5)
    assert (schedule.stages, schedule.ranks, schedule.microbatches) == (3, 3, 5)


@pytest.mark.parametrize("forward_only", [True, False])
def test_a_schedule_knows_whether_it_runs_backward(forward_only):
    schedule = make_schedule("1F1B", stages=2, microbatches=2, forward_only=forward_only)
    assert schedule.has_backward is not forward_only


def test_a_chain_routes_between_neighbours_both_ways():
    assert Routes.chain(3) == Routes(((0, 1), (1, 2)), ((1, 0), (2, 1)))
    assert Routes.chain(1) == Routes((), ())


def test_transfer_ends_name_every_stage_at_the_other_end_in_ascending_order():
    routes = Routes(((0, 1), (0, 3), (1, 3)), ((1, 0), (3, 0), (3, 1)))
    assert routes.transfer_ends((0, 1, 2, 3)) == {
        (0, Kind.SEND_F): (1, 3),
        (1, Kind.SEND_F): (3,),
        (1, Kind.RECV_F): (0,),
        (3, Kind.RECV_F): (0, 1),
        (3, Kind.SEND_B): (0, 1),
        (1, Kind.SEND_B): (0,),
        (1, Kind.RECV_B): (3,),
        (0, Kind.RECV_B): (1, 3),
    }
    assert routes.local_sources((0, 1, 2, 3)) == {}


def test_a_route_within_a_rank_has_a_local_source_and_no_transfer():
    routes, placement = Routes.chain(4), (0, 0, 1, 1)
    assert routes.transfer_ends(placement) == {
        (1, Kind.SEND_F): (2,),
        (2, Kind.RECV_F): (1,),
        (2, Kind.SEND_B): (1,),
        (1, Kind.RECV_B): (2,),
    }
    assert routes.local_sources(placement) == {
        (1, Kind.F): (0,),
        (3, Kind.F): (2,),
        (0, Kind.B): (1,),
        (2, Kind.B): (3,),
    }


@pytest.mark.parametrize(
    ("forward", "backward", "problem"),
    [
        (((1, 2), (0, 1)), (), "forward routes are not in ascending order"),
        ((), ((1, 0), (1, 0)), "backward routes are not in ascending order"),
        (((1, 0),), (), "no forward route leads from stage 1 to 0"),
        ((), ((0, 1),), "no backward route leads from stage 0 to 1"),
        (((1, 1),), (), "no forward route leads from stage 1 to 1"),
        (((-1, 0),), (), "no forward route leads from stage -1 to 0"),
    ],
)
def test_routes_that_cannot_be_are_refused(forward, backward, problem):
    with pytest.raises(ScheduleError, match=problem):
        Routes(forward, backward)


def test_a_route_to_a_stage_on_no_rank_is_reported():
    with pytest.raises(ScheduleError, match="from stage 1 to 2 names a stage that no rank has"):
        Routes.chain(3).transfer_ends((0, 1))

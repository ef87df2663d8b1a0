import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.errors import OptionError, ScheduleError
from fxpipe.schedule import Kind, Routes, Schedule, add_transfers, make_schedule
from fxpipe.schedule.actions import COMPUTE, RECEIVES, Action


def texts(program):
    return [" ".join(map(str, order)) for order in program]


def test_a_receive_stands_right_before_its_need_without_prefetch():
    schedule = make_schedule("1F1B", stages=2, microbatches=2)
    assert texts(add_transfers(schedule, Routes.chain(2), prefetch=0)) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    ]


def test_a_receive_stands_prefetch_compute_actions_ahead():
    schedule = make_schedule("GPipe", stages=2, microbatches=3)
    assert texts(add_transfers(schedule, Routes.chain(2), prefetch=2)) == [
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0F2 0SEND_F2 0RECV_B2 0B0 0B1 0B2",
        "1RECV_F0 1RECV_F1 1RECV_F2 1F0 1F1 1F2 1B0 1SEND_B0 1B1 1SEND_B1 1B2 1SEND_B2",
    ]


def test_one_transfer_action_stands_for_all_routes_of_its_stage():
    schedule = make_schedule("GPipe", stages=3, microbatches=1)
    routes = Routes(((0, 1), (0, 2), (1, 2)), ((1, 0), (2, 0), (2, 1)))
    assert texts(add_transfers(schedule, routes)) == [
        "0RECV_B0 0F0 0SEND_F0 0B0",
        "1RECV_F0 1RECV_B0 1F0 1SEND_F0 1B0 1SEND_B0",
        "2RECV_F0 2F0 2B0 2SEND_B0",
    ]


def test_the_gradient_of_a_skip_edge_may_come_back_over_another_consumer():
    schedule = make_schedule("GPipe", stages=4, microbatches=1)
    routes = Routes(((0, 2), (0, 3)), ((2, 0), (3, 2)))
    assert texts(add_transfers(schedule, routes, prefetch=0)) == [
        "0F0 0SEND_F0 0RECV_B0 0B0",
        "1F0 1B0",
        "2RECV_F0 2F0 2RECV_B0 2B0 2SEND_B0",
        "3RECV_F0 3F0 3B0 3SEND_B0",
    ]


def test_a_frozen_first_stage_receives_no_gradient():
    schedule = make_schedule("1F1B", stages=3, microbatches=1)
    first, second, third = texts(add_transfers(schedule, Routes(((0, 1), (1, 2)), ((2, 1),))))
    assert first == "0F0 0SEND_F0 0B0"
    assert second == "1RECV_F0 1RECV_B0 1F0 1SEND_F0 1B0"
    assert third == "2RECV_F0 2F0 2B0 2SEND_B0"


def test_a_route_within_a_rank_gets_no_transfer():
    order = tuple(map(Action.parse, ("0F0", "1F0", "1B0", "0B0")))
    schedule = Schedule("by hand", (order,), (0, 0), 1)
    assert add_transfers(schedule, Routes.chain(2)) == (order,)


def test_the_input_grad_half_of_a_backward_has_its_transfers_and_the_other_half_none():
    orders = ("0F0 0I0 0W0", "1F0 1I0 1W0")
    schedule = Schedule(
        "by hand", tuple(tuple(map(Action.parse, o.split())) for o in orders), (0, 1), 1
    )
    assert texts(add_transfers(schedule, Routes.chain(2), prefetch=0)) == [
        "0F0 0SEND_F0 0RECV_B0 0I0 0W0",
        "1RECV_F0 1F0 1I0 1SEND_B0 1W0",
    ]


@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 12))
def test_receives_keep_the_order_of_their_consumers_and_the_compute_its_own(S, M, prefetch):
    schedule = make_schedule("1F1B", stages=S, microbatches=M)
    program = add_transfers(schedule, Routes.chain(S), prefetch=prefetch)
    for order, done in zip(schedule.orders, program, strict=True):
        assert tuple(a for a in done if a.kind in COMPUTE) == order
        receives = [a for a in done if a.kind in (Kind.RECV_F, Kind.RECV_B)]
        needs = [Action(a.stage, RECEIVES[a.kind], a.microbatch) for a in order]
        assert receives == [a for a in needs if a in receives]


def test_a_negative_prefetch_is_refused():
    schedule = make_schedule("1F1B", stages=2, microbatches=1)
    with pytest.raises(OptionError, match="prefetch is -1"):
        add_transfers(schedule, Routes.chain(2), prefetch=-1)


def test_a_route_of_a_stage_the_schedule_lacks_is_reported():
    schedule = make_schedule("1F1B", stages=2, microbatches=1)
    with pytest.raises(ScheduleError, match="names a stage that no rank has"):
        add_transfers(schedule, Routes.chain(3))

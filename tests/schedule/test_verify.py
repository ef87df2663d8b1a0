import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.errors import ScheduleError
from fxpipe.schedule import Costs, Routes, Schedule, add_transfers, make_schedule, simulate, verify
from fxpipe.schedule.actions import COMPUTE, DIRECTION, RECEIVES, SENDS, Action, Kind

SKIPS = Routes(((0, 1), (0, 3), (1, 2), (2, 3)), ((1, 0), (2, 0), (2, 1), (3, 2)))
ROUTES = {
    "chain": Routes.chain(4),
    "skip edge, its gradient over a chain of consumers": SKIPS,
    "skip edges only": Routes(((0, 2), (0, 3), (1, 3)), ((2, 0), (3, 1), (3, 2))),
    "frozen first stage": Routes(((0, 1), (1, 2), (2, 3)), ((2, 1), (3, 2))),
    "forward only": Routes(((0, 1), (1, 2), (2, 3)), ()),
}
every_route = pytest.mark.parametrize("routes", ROUTES.values(), ids=ROUTES.keys())
every_name = pytest.mark.parametrize("name", ["GPipe", "1F1B"])


def parse(*orders):
    return tuple(tuple(map(Action.parse, order.split())) for order in orders)


def with_transfers(orders, placement, routes, prefetch=1):
    schedule = Schedule("by hand", parse(*orders), placement, 0)
    return add_transfers(schedule, routes, prefetch=prefetch)


def replaced(program, rank, order):
    return (*program[:rank], tuple(order), *program[rank + 1 :])


def refused(program, routes, *, placement=None, microbatches):
    placement = placement or tuple(range(len(program)))
    with pytest.raises(ScheduleError) as caught:
        verify(program, placement=placement, routes=routes, microbatches=microbatches)
    return caught.value


def programs_with_one_change(name, routes, change):
    """(rank, the transfer changed, the changed program), for each transfer of a small program."""
    schedule = make_schedule(name, stages=4, microbatches=3)
    program = add_transfers(schedule, routes)
    for rank, order in enumerate(program):
        for i, action in enumerate(order):
            if action.kind not in COMPUTE:
                yield rank, action, replaced(program, rank, change(order, i))


@every_name
@every_route
def test_a_missing_transfer_is_named_with_the_ranks_that_hang(name, routes):
    for rank, action, program in programs_with_one_change(
        name, routes, lambda order, i: order[:i] + order[i + 1 :]
    ):
        error = refused(program, routes, microbatches=3)
        assert error.problem == f"{action} is missing from the program of rank {rank}"
        assert f"rank {rank}" in error.at
        assert " waits at " in error.at


@every_name
@every_route
def test_a_transfer_that_stands_twice_is_named_with_the_ranks_that_hang(name, routes):
    for rank, action, program in programs_with_one_change(
        name, routes, lambda order, i: order[: i + 1] + order[i:]
    ):
        error = refused(program, routes, microbatches=3)
        assert error.problem == f"{action} stands 2 times in the program of rank {rank}"
        assert f"rank {rank}" in error.at
        assert " waits at " in error.at


@every_name
@every_route
def test_two_transfers_swapped_are_refused_with_the_ranks_that_hang(name, routes):
    def swap(order, i):
        stage, kind, m = order[i]
        j = order.index((stage, kind, (m + 1) % 3))
        return [order[{i: j, j: i}.get(k, k)] for k in range(len(order))]

    for rank, _, program in programs_with_one_change(name, routes, swap):
        error = refused(program, routes, microbatches=3)
        assert error.problem == "schedule deadlocks"
        assert f"rank {rank}" in error.at
        assert " waits at " in error.at


def test_a_transfer_repeated_at_both_ends_is_refused_although_nothing_hangs():
    routes = Routes(((0, 1),), ())
    program = parse("0F0 0SEND_F0 0SEND_F0 0B0", "1RECV_F0 1RECV_F0 1F0 1B0")
    error = refused(program, routes, microbatches=1)
    assert error.problem == "0SEND_F0 stands 2 times in the program of rank 0"


def test_a_transfer_on_another_rank_than_its_stage_is_refused():
    program = parse("0F0 0B0 1RECV_F0", "0SEND_F0 1F0 1B0")
    error = refused(program, Routes(((0, 1),), ()), microbatches=1)
    assert error.problem == "no route asks for 1RECV_F0 on rank 0"


def test_a_transfer_that_no_route_asks_for_is_refused():
    program = parse("0F0 0SEND_F0 0B0", "1F0 1B0")
    error = refused(program, Routes((), ()), microbatches=1)
    assert error.problem == "no route asks for 0SEND_F0 on rank 0"


def test_a_wait_cycle_is_reported_with_each_rank_and_what_it_waits_for():
    orders = ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    program = with_transfers(orders, (0, 1), Routes.chain(2))
    assert str(refused(program, Routes.chain(2), microbatches=2)) == (
        "schedule deadlocks\n"
        "  at: rank 0 waits at 0B0 for 1SEND_B0 from rank 1; "
        "rank 1 waits at 1F1 for 0SEND_F1 from rank 0"
    )


def test_ranks_that_only_wait_for_the_stuck_ones_are_left_out():
    orders = (
        "0F0 0F1 0B0 0B1",
        "1F0 1B0 1F1 1B1",
        "2F0 2F1 2B0 2B1",
        "3F0 3F1 3B0 3B1",
    )
    program = with_transfers(orders, (0, 1, 2, 3), Routes.chain(4))
    assert refused(program, Routes.chain(4), microbatches=2).at == (
        "rank 1 waits at 1B0 for 2SEND_B0 from rank 2; rank 2 waits at 2F1 for 1SEND_F1 from rank 1"
    )


def test_the_shortest_of_two_wait_cycles_is_reported():
    one_by_one, all_forward = "{0}F0 {0}B0 {0}F1 {0}B1", "{0}F0 {0}F1 {0}B0 {0}B1"
    rules = (one_by_one, all_forward, all_forward, one_by_one, all_forward)
    orders = [rule.format(stage) for stage, rule in enumerate(rules)]
    # a cycle of ranks 0, 1 and 2, and one of ranks 3 and 4
    routes = Routes(((0, 1), (1, 2), (3, 4)), ((2, 0), (4, 3)))
    program = with_transfers(orders, (0, 1, 2, 3, 4), routes)
    assert refused(program, routes, microbatches=2).at == (
        "rank 3 waits at 3B0 for 4SEND_B0 from rank 4; rank 4 waits at 4F1 for 3SEND_F1 from rank 3"
    )


def test_messages_in_another_order_at_each_end_are_reported_with_both_heads():
    program = parse("0F0 0SEND_F0 0F1 0SEND_F1 0B0 0B1", "1RECV_F1 1F1 1RECV_F0 1F0 1B0 1B1")
    assert refused(program, Routes(((0, 1),), ()), microbatches=2).at == (
        "rank 1 waits at 1F1 for 0SEND_F1 from rank 0, "
        "where F0 of 0->1 is sent and F1 of 0->1 received"
    )


def test_two_routes_between_two_ranks_share_one_queue():
    # 1->2 and 0->3 both lead from rank 0 to rank 1
    routes, placement = Routes(((0, 3), (1, 2)), ()), (0, 0, 1, 1)
    backward = "1B0 0B0", "3B0 2B0"
    same = [f"0F0 1F0 {backward[0]}", f"3F0 2F0 {backward[1]}"]
    program = with_transfers(same, placement, routes)
    verify(program, placement=placement, routes=routes, microbatches=1)
    other = [f"0F0 1F0 {backward[0]}", f"2F0 3F0 {backward[1]}"]
    program = with_transfers(other, placement, routes)
    error = refused(program, routes, placement=placement, microbatches=1)
    assert error.at == (
        "rank 1 waits at 2F0 for 1SEND_F0 from rank 0, "
        "where F0 of 0->3 is sent and F0 of 1->2 received"
    )


def test_several_stages_of_a_rank_may_feed_each_other_without_transfers():
    routes, placement = Routes.chain(4), (0, 0, 1, 1)
    orders = ("0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1", "2F0 3F0 3B0 2B0 2F1 3F1 3B1 2B1")
    program = with_transfers(orders, placement, routes)
    verify(program, placement=placement, routes=routes, microbatches=2)
    assert not any(a.stage in (0, 3) for order in program for a in order if a.kind not in COMPUTE)


def test_a_loop_placement_passes_with_two_stages_a_rank():
    routes, placement = Routes.chain(4), (0, 1, 0, 1)
    orders = ("0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1")
    program = with_transfers(orders, placement, routes)
    verify(program, placement=placement, routes=routes, microbatches=2)


def test_a_value_used_before_its_own_rank_makes_it_is_reported():
    placement = (0, 0)
    error = refused(parse("1F0 0F0 1B0 0B0"), Routes.chain(2), placement=placement, microbatches=1)
    assert error.at == "rank 0 waits at 1F0 for 0F0, which does not stand before it"
    error = refused(parse("0F0 1F0 0B0 1B0"), Routes.chain(2), placement=placement, microbatches=1)
    assert error.at == "rank 0 waits at 0B0 for 1B0, which does not stand before it"


def test_a_backward_before_its_own_forward_is_reported():
    error = refused(parse("0B0 0F0"), Routes((), ()), microbatches=1)
    assert error.at == "rank 0 waits at 0B0 for 0F0, which does not stand before it"


def test_a_send_before_its_result_is_reported():
    program = parse("0SEND_F0 0F0 0B0", "1RECV_F0 1F0 1B0")
    error = refused(program, Routes(((0, 1),), ()), microbatches=1)
    assert error.at == "rank 0 waits at 0SEND_F0 for 0F0, which does not stand before it"


def test_a_receive_after_its_need_is_reported():
    program = parse("0F0 0SEND_F0 0B0", "1F0 1RECV_F0 1B0")
    error = refused(program, Routes(((0, 1),), ()), microbatches=1)
    assert error.at == "rank 1 waits at 1F0 for 1RECV_F0, which does not stand before it"


def test_a_split_backward_counts_as_a_whole_one():
    orders = ("0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1I0 1F1 1I1 1W0 1W1")
    program = with_transfers(orders, (0, 1), Routes.chain(2))
    verify(program, placement=(0, 1), routes=Routes.chain(2), microbatches=2)


def test_stages_and_microbatches_may_split_their_backward_or_not():
    orders = ("0F0 0F1 0I0 0B1 0W0", "1F0 1B0 1F1 1B1")
    program = with_transfers(orders, (0, 1), Routes.chain(2))
    verify(program, placement=(0, 1), routes=Routes.chain(2), microbatches=2)


def test_a_weight_half_before_its_input_half_is_reported():
    error = refused(parse("0F0 0W0 0I0"), Routes((), ()), microbatches=1)
    assert error.at == "rank 0 waits at 0W0 for 0I0, which does not stand before it"


@pytest.mark.parametrize(
    ("order", "problem"),
    [
        ("0F0", "stage 0 runs F for microbatch 0, not F and B, or F, I and W"),
        ("0B0", "stage 0 runs B for microbatch 0, not F and B, or F, I and W"),
        ("", "stage 0 runs nothing for microbatch 0, not F and B, or F, I and W"),
        ("0F0 0I0", "stage 0 runs F, I for microbatch 0, not F and B, or F, I and W"),
        ("0F0 0B0 0W0", "stage 0 runs B, F, W for microbatch 0, not F and B, or F, I and W"),
        ("0F0 0B0 0B0", "0B0 stands twice"),
        ("0F0 0B0 0F1", "0F1 names a stage or microbatch that does not exist"),
        ("0F0 0B0 1F0", "1F0 names a stage or microbatch that does not exist"),
    ],
)
def test_compute_that_is_not_complete_is_reported(order, problem):
    error = refused(parse(order), Routes((), ()), microbatches=1)
    assert (error.problem, error.at) == (problem, "rank 0")


def test_compute_on_another_rank_than_its_stage_is_reported():
    error = refused(parse("1F0 1B0", "0F0 0B0"), Routes((), ()), microbatches=1)
    assert str(error) == "1F0 is not on the rank of its stage, 1\n  at: rank 0"


def test_a_placement_on_a_rank_the_program_lacks_is_reported():
    error = refused(parse("0F0 0B0"), Routes((), ()), placement=(0, 1), microbatches=1)
    assert error.problem == "stage 1 is placed on rank 1, but the program has 1 ranks"


def test_a_backward_in_a_forward_only_program_is_reported():
    with pytest.raises(ScheduleError, match="0B0 stands in a forward-only program"):
        verify(
            parse("0F0 0B0"),
            placement=(0,),
            routes=Routes((), ()),
            microbatches=1,
            forward_only=True,
        )


def test_a_forward_only_program_needs_no_gradient_transfers():
    schedule = make_schedule("1F1B", stages=3, microbatches=2, forward_only=True)
    program = add_transfers(schedule, Routes.chain(3))
    verify(
        program,
        placement=schedule.placement,
        routes=Routes.chain(3),
        microbatches=2,
        forward_only=True,
    )


@every_name
@every_route
@given(microbatches=st.integers(1, 9), prefetch=st.integers(0, 9))
def test_one_stage_a_rank_passes_with_any_routes(name, routes, microbatches, prefetch):
    schedule = make_schedule(name, stages=4, microbatches=microbatches)
    program = add_transfers(schedule, routes, prefetch=prefetch)
    verify(program, placement=schedule.placement, routes=routes, microbatches=microbatches)


def test_sixty_four_ranks_and_hundreds_of_microbatches_take_seconds():
    # a scan of the program for each action would take minutes; the limit leaves room for slow CI
    schedule = make_schedule("1F1B", stages=64, microbatches=256)
    sizes = {"placement": schedule.placement, "routes": Routes.chain(64)}
    program = add_transfers(schedule, sizes["routes"])
    start = time.process_time()
    verify(program, microbatches=256, **sizes)
    simulate(program, costs=Costs(1, 2, latency=0.1), **sizes)
    assert time.process_time() - start < 10


def finishes(program, placement, routes):
    """The rendezvous model again, the slow and obvious way: try everything until nothing moves."""
    arrived, made, queues = set(), set(), {}
    position = [0] * len(program)

    def edges(action, end):
        pairs = routes.forward if DIRECTION[action.kind] is Kind.F else routes.backward
        return [p for p in pairs if p[end] == action.stage and placement[p[0]] != placement[p[1]]]

    def post(rank, action):
        sends = action.kind in SENDS.values()
        for pair in edges(action, 0 if sends else 1):
            key = (placement[pair[0]], placement[pair[1]], DIRECTION[action.kind])
            queues.setdefault((*key, sends), []).append((*pair, action.microbatch))

    def runs(rank, action):
        stage, kind, m = action
        if kind is Kind.W:
            return (stage, Kind.B, m) in made
        direction = DIRECTION[kind]
        if kind in SENDS.values():
            return (stage, direction, m) in made
        if kind in RECEIVES.values():
            return True
        if direction is Kind.B and (stage, Kind.F, m) not in made:
            return False
        pairs = routes.forward if direction is Kind.F else routes.backward
        return all(
            (source, direction, m) in made
            if placement[source] == rank
            else (source, target, direction, m) in arrived
            for source, target in pairs
            if target == stage
        )

    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(program):
            while position[rank] < len(order) and runs(rank, order[position[rank]]):
                action = order[position[rank]]
                if action.kind in COMPUTE:
                    made.add((action.stage, DIRECTION.get(action.kind), action.microbatch))
                else:
                    post(rank, action)
                position[rank] += 1
                moved = True
        for *key, sends in list(queues):
            sent, received = queues[*key, sends], queues.get((*key, not sends), [])
            if sends and sent and received and sent[0] == received[0]:
                source, target, m = sent.pop(0)
                received.pop(0)
                arrived.add((source, target, key[2], m))
                moved = True
    ended = all(p == len(order) for p, order in zip(position, program, strict=True))
    return ended and not any(queues.values())


PLACEMENTS = [(0, 1, 2, 3), (0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0)]


@st.composite
def shuffled_programs(draw):
    """Complete programs of four stages, their orders disturbed by moving a few actions."""
    placement = draw(st.sampled_from(PLACEMENTS))
    routes = draw(st.sampled_from([r for n, r in ROUTES.items() if n != "forward only"]))
    stages, split = range(4), draw(st.booleans())
    forward = [Action(s, Kind.F, m) for m in range(2) for s in stages]
    kinds = (Kind.I, Kind.W) if split else (Kind.B,)
    backward = [Action(s, k, m) for m in range(2) for s in reversed(stages) for k in kinds]
    orders = tuple(
        tuple(a for a in forward + backward if placement[a.stage] == rank)
        for rank in range(max(placement) + 1)
    )
    schedule = Schedule("drawn", orders, placement, 2)
    program = [list(o) for o in add_transfers(schedule, routes, prefetch=draw(st.integers(0, 2)))]
    for _ in range(draw(st.integers(0, 2))):
        order = program[draw(st.integers(0, len(program) - 1))]
        action = order.pop(draw(st.integers(0, len(order) - 1)))
        order.insert(draw(st.integers(0, len(order))), action)
    return tuple(map(tuple, program)), placement, routes


@given(shuffled_programs())
def test_verify_passes_exactly_the_programs_that_finish(drawn):
    program, placement, routes = drawn
    if finishes(program, placement, routes):
        verify(program, placement=placement, routes=routes, microbatches=2)
    else:
        error = refused(program, routes, placement=placement, microbatches=2)
        assert " waits at " in error.at

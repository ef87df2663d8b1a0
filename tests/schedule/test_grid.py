from fxpipe.schedule import Costs, Routes, add_transfers, format_grid, make_schedule, simulate


def grid(costs, *, cell=None, **sizes):
    schedule = make_schedule(**sizes)
    routes = Routes.chain(schedule.stages)
    program = add_transfers(schedule, routes, prefetch=9)
    timeline = simulate(program, placement=schedule.placement, routes=routes, costs=costs)
    return format_grid(timeline, cell=cell)


def test_a_long_action_goes_on_in_dashes():
    assert grid(Costs(forward=1, backward=2), name="1F1B", stages=2, microbatches=2) == (
        "rank 0 | 0F0 0F1 .   .   0B0 -   .   0B1 -\n"
        "rank 1 | .   1F0 1B0 -   1F1 1B1 -   .   .\n"
        "bubble 33.3%\n"
    )


def test_a_cell_may_be_longer_or_shorter_than_the_actions():
    sizes = {"name": "GPipe", "stages": 1, "microbatches": 2}
    assert (
        grid(Costs(2, 2), cell=1, **sizes)
        == "rank 0 | 0F0 -   0F1 -   0B0 -   0B1 -\nbubble 0.0%\n"
    )
    assert grid(Costs(2, 2), cell=9, **sizes) == "rank 0 | 0F0 0F1 0B0 0B1\nbubble 0.0%\n"


def test_times_that_no_float_holds_keep_their_columns():
    sizes = {"name": "1F1B", "stages": 4, "microbatches": 9}
    assert grid(Costs(0.1, 0.1), cell=0.1, **sizes) == grid(Costs(1, 1), **sizes)


def test_the_span_bubble_is_printed_where_it_differs():
    schedule = make_schedule("1F1B", stages=2, microbatches=2, forward_only=True)
    assert format_grid(schedule) == (
        "rank 0 | 0F0 0F1 .\nrank 1 | .   1F0 1F1\nbubble 33.3%, span 0.0%\n"
    )


def test_labels_of_ten_ranks_and_more_line_up():
    lines = format_grid(make_schedule("1F1B", stages=11, microbatches=1)).splitlines()[:-1]
    assert len({line.index("|") for line in lines}) == 1

from hypothesis import given
from hypothesis import strategies as st

from fxpipe.schedule.actions import Action, Kind
from fxpipe.schedule.roll import Loop, expand, roll

few = st.integers(0, 2)
actions = st.builds(Action, few, st.sampled_from((Kind.F, Kind.B, Kind.SEND_F)), st.integers(0, 6))
loops = st.builds(
    Loop, st.lists(actions, min_size=1, max_size=3).map(tuple), st.integers(1, 5), st.integers(0, 2)
)


def parse(text):
    return [Action.parse(token) for token in text.split()]


@given(st.lists(actions))
def test_any_list_is_itself_after_roll_and_expand(flat):
    assert expand(roll(flat)) == flat


@given(st.lists(loops, max_size=4))
def test_a_list_made_of_loops_is_itself_after_expand_roll_and_expand(rolled):
    flat = expand(rolled)
    again = roll(flat)
    assert expand(again) == flat
    assert all(loop.count >= 3 for loop in again if isinstance(loop, Loop))


def test_a_period_becomes_a_loop_that_starts_at_its_first_turn():
    flat = parse("0F0 0F1 0B0 0F2 0B1 0F3 0B2 0F4 0B3 0B4")
    assert roll(flat) == [*parse("0F0"), Loop(tuple(parse("0F1 0B0")), 4, 1), *parse("0B4")]


def test_two_turns_stay_as_they_are():
    flat = parse("0F0 0B0 0F1 0B1")
    assert roll(flat) == flat


def test_microbatches_may_fall_or_step_by_more_than_one():
    assert roll(parse("0B6 0B4 0B2 0B0")) == [Loop(tuple(parse("0B6")), 4, -2)]


def test_a_repetition_without_a_shift_is_no_loop():
    flat = parse("0F1 0F1 0F1 0F1")
    assert roll(flat) == flat


def test_the_text_of_a_loop_shows_count_body_and_shift():
    assert str(Loop(tuple(parse("1B0 1F3")), 61, 1)) == "61 x [1B0 1F3] +1"

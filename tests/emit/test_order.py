"""The printed order is the program, loop by loop."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.emit.order import step_lines
from fxpipe.runtime.script_tables import Recorder
from fxpipe.schedule import SCHEDULES, Action, Kind, Routes, add_transfers, make_schedule


def performed(lines):
    """The actions of a step function with this body."""
    names = {}
    exec("def step(p):\n" + "\n".join(f"    {line}" for line in lines), names)
    recorder = Recorder()
    names["step"](recorder)
    return recorder.actions


@settings(deadline=None)
@given(st.sampled_from(SCHEDULES), st.integers(1, 6), st.integers(1, 20), st.booleans())
def test_the_printed_step_of_every_schedule_performs_its_program(name, stages, count, unroll):
    schedule = make_schedule(name, stages=stages, microbatches=count)
    for actions in add_transfers(schedule, Routes.chain(stages)):
        assert performed(step_lines(actions, unroll=unroll)) == list(actions)


@given(st.lists(st.builds(Action, st.integers(0, 2), st.sampled_from(Kind), st.integers(0, 9))))
def test_any_list_of_actions_is_printed_as_what_performs_it(actions):
    if actions:
        assert performed(step_lines(actions)) == actions


def test_a_loop_may_count_down_or_in_steps():
    down = [Action(0, Kind.B, m) for m in (5, 4, 3)]
    assert step_lines(down) == ["for k in range(3):", "    p.B(0, 5 - k)"]
    by_two = [Action(0, Kind.F, m) for m in (1, 3, 5)]
    assert step_lines(by_two) == ["for k in range(3):", "    p.F(0, 2 * k + 1)"]
    two_down = [Action(0, Kind.F, m) for m in (5, 3, 1)]
    assert performed(step_lines(two_down)) == two_down


def test_an_action_that_does_not_exist_is_named():
    with pytest.raises(AttributeError, match="no action 'SEND'"):
        Recorder().SEND(0, 0)

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.errors import ScheduleError
from fxpipe.schedule.actions import Action, Kind

numbers = st.integers(0, 10_000)
actions = st.builds(Action, numbers, st.sampled_from(Kind), numbers)


@given(actions)
def test_action_text_round_trips(action):
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(2, Kind.F, 0)),
        ("12SEND_F34", Action(12, Kind.SEND_F, 34)),
        ("1RECV_B3", Action(1, Kind.RECV_B, 3)),
        ("0I7", Action(0, Kind.I, 7)),
    ],
)
def test_action_text_is_that_of_pytorch(text, action):
    assert str(action) == text
    assert Action.parse(text) == action


@pytest.mark.parametrize(
    "text", ["", "F0", "2F", "2X0", "2f0", " 2F0", "2F0\n", "-1F0", "2F0 2F1", "٢F0"]
)
def test_text_that_is_no_action_is_reported_with_the_kinds(text):
    with pytest.raises(ScheduleError, match="is not an action") as caught:
        Action.parse(text)
    assert "RECV_B" in caught.value.hint

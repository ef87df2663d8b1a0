import pytest

from fxpipe.errors import OptionError
from fxpipe.schedule import SCHEDULES, make_schedule


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_name_makes_the_schedule_of_that_name_whatever_its_case(name):
    for spelled in (name, name.lower(), name.upper()):
        assert make_schedule(spelled, stages=2, microbatches=3).name == name


def test_an_unknown_name_is_reported_with_the_names():
    with pytest.raises(OptionError, match="no schedule is named '2F2B'") as caught:
        make_schedule("2F2B", stages=2, microbatches=2)
    assert caught.value.hint == "schedules are: GPipe, 1F1B"


@pytest.mark.parametrize("name", SCHEDULES)
def test_chunks_need_a_schedule_that_has_them(name):
    with pytest.raises(OptionError, match=f"{name} holds one stage a rank"):
        make_schedule(name, stages=4, chunks=2, microbatches=2)


@pytest.mark.parametrize(
    "sizes", [{"stages": 0, "microbatches": 1}, {"stages": 1, "microbatches": 0}]
)
def test_no_stage_or_no_microbatch_is_refused(sizes):
    with pytest.raises(OptionError, match="needs a stage and a microbatch"):
        make_schedule("1F1B", **sizes)


def test_forward_only_checks_the_name_too():
    with pytest.raises(OptionError, match="no schedule is named"):
        make_schedule("none", stages=2, microbatches=2, forward_only=True)

"""Measured timelines: every action once, no waits, the same numbers, nothing left behind."""

import time

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.errors import FxpipeError, RankError
from fxpipe.runtime.timing import CpuClock, CudaClock
from fxpipe.schedule import Kind
from tests.ranks import run_ranks

COMPUTE = (Kind.F, Kind.B)


class Slow(nn.Module):
    """Takes `seconds` in forward; the trace keeps it whole."""

    def __init__(self, seconds: float):
        super().__init__()
        self.linear, self.seconds = nn.Linear(4, 4), seconds

    def forward(self, x):
        time.sleep(self.seconds)
        return self.linear(x)


class Failing(nn.Linear):
    fails = False

    def forward(self, x):
        if self.fails:
            raise ValueError("boom")
        return super().forward(x)


def make_pipe(*modules, cuts=("1",)):
    model = nn.Sequential(*modules)
    leaves = tuple(name for name, m in model.named_children() if isinstance(m, (Slow, Failing)))
    return fxpipe.compile(
        model,
        stages=len(cuts) + 1,
        cuts=cuts,
        microbatches=4,
        loss=nn.functional.mse_loss,
        leaf_modules=leaves,
    )


def batch():
    return torch.ones(8, 4), torch.zeros(8, 4)


def actions_of(timeline):
    return [tuple(span.action for span in rank) for rank in timeline.spans]


def compute_of(pipe):
    return [tuple(a for a in pipe.program(r) if a.kind in COMPUTE) for r in range(2)]


def test_each_step_has_a_timeline_with_every_compute_action_in_program_order():
    pipe, (x, y) = make_pipe(nn.Linear(4, 4), nn.Linear(4, 4)), batch()
    with pipe.timed() as timelines:
        for _ in range(3):
            pipe.step(x, target=y)
    assert [actions_of(t) for t in timelines] == [compute_of(pipe)] * 3
    assert all(span.end > span.start for t in timelines for rank in t.spans for span in rank)


def test_ranks_of_one_process_are_placed_side_by_side_each_action_as_long_as_it_took():
    pipe, (x, y) = make_pipe(Slow(0.01), Slow(0.01)), batch()
    with pipe.timed() as timelines:
        pipe.step(x, target=y)
    (timeline,) = timelines
    assert min(timeline.busy) >= 4 * 0.01
    assert timeline.makespan < sum(timeline.busy)  # in turns, it would be the sum
    assert 0 < timeline.bubble < 0.5  # in turns, each of two ranks would idle half of the time


def test_forwards_alone_are_timed_too():
    pipe, (x, _) = make_pipe(nn.Linear(4, 4), nn.Linear(4, 4)), batch()
    with pipe.timed() as timelines:
        pipe.eval()(x)
    (timeline,) = timelines
    assert [[a.kind for a in rank] for rank in actions_of(timeline)] == [[Kind.F] * 4] * 2


def test_a_plain_loop_is_one_step_of_two_halves():
    pipe, (x, y) = make_pipe(nn.Linear(4, 4), nn.Linear(4, 4)), batch()
    with pipe.timed() as timelines:
        nn.functional.mse_loss(pipe(x), y).backward()
        pipe(x)  # and a forward that nobody runs backward
    whole, half = timelines
    forwards, backwards = [Kind.F] * 4, [Kind.B] * 4
    assert [[a.kind for a in rank] for rank in actions_of(whole)] == [forwards + backwards] * 2
    assert [[a.kind for a in rank] for rank in actions_of(half)] == [forwards] * 2


def test_timing_changes_no_number():
    x, y = batch()
    found = []
    for is_timed in (False, True):
        torch.manual_seed(0)
        pipe = make_pipe(nn.Linear(4, 4), nn.Linear(4, 4))
        if is_timed:
            with pipe.timed():
                pipe.step(x, target=y)
        else:
            pipe.step(x, target=y)
        found.append([p.grad for p in pipe.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_step_outside_is_not_timed():
    pipe, (x, y) = make_pipe(nn.Linear(4, 4), nn.Linear(4, 4)), batch()
    pipe.step(x, target=y)
    with pipe.timed() as timelines:
        pipe.step(x, target=y)
    pipe.step(x, target=y)
    assert [actions_of(t) for t in timelines] == [compute_of(pipe)]


def test_a_step_that_fails_leaves_no_timing_behind(monkeypatch):
    pipe, (x, y) = make_pipe(nn.Linear(4, 4), Failing(4, 4)), batch()
    pipe.step(x, target=y)
    monkeypatch.setattr(Failing, "fails", True)
    with pytest.raises(RankError, match="boom"), pipe.timed() as failed:
        pipe.step(x, target=y)
    monkeypatch.undo()
    assert failed == []
    with pipe.timed() as timelines:
        pipe.step(x, target=y)
    assert [actions_of(t) for t in timelines] == [compute_of(pipe)]


def test_timing_twice_at_once_is_refused():
    pipe = make_pipe(nn.Linear(4, 4), nn.Linear(4, 4))
    with pipe.timed(), pytest.raises(FxpipeError, match="timed already"), pipe.timed():
        pass


def test_between_processes_every_rank_knows_all_spans_and_waiting_is_in_none():
    def train(rank):
        torch.manual_seed(0)
        pipe, (x, y) = make_pipe(Slow(0.01), nn.Linear(4, 4)), batch()
        with pipe.timed() as timelines:
            pipe.step(x, target=y)
            pipe.step(x, target=y)
        return timelines, compute_of(pipe)

    (timelines, compute), (seen_by_1, _) = run_ranks(2, train)
    assert timelines == seen_by_1
    assert [actions_of(t) for t in timelines] == [compute] * 2
    for timeline in timelines:
        first, second = ({s.action: s for s in rank} for rank in timeline.spans)
        assert timeline.spans[0][0].start == 0.0
        for action, span in second.items():
            if action.kind is Kind.F:  # it starts once its input is made, not when it is waited for
                assert span.start >= first[action._replace(stage=0)].end
            else:
                assert span.end <= first[action._replace(stage=0)].start


def test_processes_share_the_clock():
    def now(rank):
        clock = CpuClock()
        return clock.seconds(clock.mark())

    before = time.time()
    found = run_ranks(2, now)
    # a step of the system clock would be seen, a microsecond of rounding is none
    assert all(before - 1e-3 <= seconds <= time.time() + 1e-3 for seconds in found)


@pytest.mark.gpu
def test_on_a_device_the_clock_tells_when_the_device_computed():
    x = torch.randn(4096, 4096, device="cuda")
    x @ x
    clock = CudaClock()
    start = clock.mark()
    for _ in range(20):
        x @ x
    submitted = time.time()
    end = clock.mark()
    torch.cuda.synchronize()
    assert clock.seconds(start) < clock.seconds(end)
    assert clock.seconds(end) > submitted  # the host was ahead
    assert clock.seconds(end) <= time.time() + 1e-3

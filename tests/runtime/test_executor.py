"""The executor on programs written by hand: order, errors, and what a failed step leaves."""

import pytest
import torch
from torch import nn

from fxpipe.errors import ScheduleError, TransportError
from fxpipe.runtime.engine import AutogradEngine
from fxpipe.runtime.executor import Executor, Feed, run_cooperatively
from fxpipe.runtime.stage import (
    Layout,
    OutputGradient,
    Receive,
    Send,
    Stage,
    TensorLayout,
)
from fxpipe.runtime.transport.local import LocalNetwork
from fxpipe.schedule.actions import Action

CPU = torch.device("cpu")


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return (x * self.weight,)


class Last(nn.Module):
    def forward(self, received, target):
        return received, (received * target).sum()


def stages():
    first = Stage(
        index=0,
        module=First(),
        batch_inputs=(0,),
        sizes=(),
        receives=(),
        sends=(Send(0, 1, 0),),
        gradients=(OutputGradient(0, 1, 0),),
        num_sent=1,
    )
    last = Stage(
        index=1,
        module=Last(),
        batch_inputs=(),
        sizes=(),
        receives=(Receive(0, "y", 0, gradient_to=0),),
        sends=(),
        has_loss=True,
    )
    return first, last


def ranks(*programs, rendezvous=False, stages_=None):
    """An executor a rank, the network between them, and the parameter of the first stage."""
    network = LocalNetwork(2, rendezvous=rendezvous)
    made, found = [], stages_ or stages()
    for rank, (stage, program) in enumerate(zip(found, programs, strict=True)):
        engines = {rank: AutogradEngine(stage, has_backward=True)}
        made.append(
            Executor(
                [Action.parse(text) for text in program.split()],
                stages={rank: stage},
                engines=engines,
                placement=(0, 1),
                transport=network.port(rank),
                device=CPU,
                microbatches=2,
            )
        )
    return made, network, next(found[0].module.parameters(), None)


def feed(width=3):
    layout = Layout((TensorLayout((width,), torch.float32),), ())
    batch = [[torch.full((3,), float(m + 1))] for m in range(2)]
    return Feed(batch, [1.0, 10.0], [0.5, 0.25], [layout] * 2)


FIRST = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
LAST = "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"


@pytest.mark.parametrize("rendezvous", [False, True])
def test_gradients_add_up_over_microbatches_and_steps(rendezvous):
    executors, _, parameter = ranks(FIRST, LAST, rendezvous=rendezvous)
    for step in (1, 2):
        for executor in executors:
            executor.load(feed())
        run_cooperatively(executors, [])
        assert [float(loss) for loss in executors[1].losses] == [6.0, 120.0]
        # d/dw of 0.5 * sum(1 w) + 0.25 * sum(2 w * 10)
        assert float(parameter.grad) == step * (0.5 * 3 + 0.25 * 60)
    assert [float(out[0][0]) for out in executors[1].model_outputs] == [2.0, 4.0]


def test_ranks_that_wait_for_one_another_are_named_with_their_actions():
    executors, _, _ = ranks("0F0 0RECV_B0 0B0 0SEND_F0", LAST)
    for executor in executors:
        executor.load(feed())
    with pytest.raises(ScheduleError, match="the ranks wait for one another") as caught:
        run_cooperatively(executors, [])
    assert caught.value.at == "rank 0 waits at 0B0; rank 1 waits at 1F0"


def test_a_value_of_another_shape_than_was_announced_is_refused():
    executors, _, _ = ranks(FIRST, LAST)
    for executor in executors:
        executor.load(feed(width=4))
    with pytest.raises(TransportError, match=r"edge 0 carries torch.float32 \[3\]") as caught:
        run_cooperatively(executors, [])
    assert r"rank 1 expects torch.float32 [4]" in caught.value.problem
    assert caught.value.at == "0SEND_F0"


def test_a_failed_step_leaves_nothing_to_the_next():
    executors, network, parameter = ranks(FIRST, LAST)
    bad = feed()
    bad.targets = [1.0, "no number"]
    for executor in executors:
        executor.load(bad)
    running = []
    with pytest.raises(TypeError):
        run_cooperatively(executors, running)
    assert str(running[0].current) == "1F1"
    for executor in executors:
        executor.drop()
    network.clear()
    parameter.grad = None
    for executor in executors:
        executor.load(feed())
    run_cooperatively(executors, [])
    assert float(parameter.grad) == 0.5 * 3 + 0.25 * 60


class Noting(nn.Module):
    def __init__(self, index, order):
        super().__init__()
        self.index, self.order = index, order

    def forward(self, x):
        self.order.append((self.index, int(x[0])))
        return (x,)


def test_no_stage_goes_forward_before_the_one_in_front_of_it():
    order = []
    apart = [Stage(i, Noting(i, order), (0,), (), (), ()) for i in range(2)]
    executors, _, _ = ranks("0F0 0F1", "1F0 1F1", stages_=apart)
    for executor in executors:
        executor.load(feed())
    run_cooperatively(executors, [])
    assert order == [(0, 1), (1, 1), (0, 2), (1, 2)]


def test_a_stage_that_must_go_first_does():
    order = []
    apart = [Stage(i, Noting(i, order), (0,), (), (), ()) for i in range(2)]
    executors, _, _ = ranks("0F0", "1F1 1F0", stages_=apart)
    for executor in executors:
        executor.load(feed())
    run_cooperatively(executors, [])
    assert order == [(0, 1), (1, 2), (1, 1)]

import pytest
import torch
from torch import nn

from fxpipe.errors import PassError
from fxpipe.manager import run_passes
from fxpipe.passes import AssignStages, LowerEdges, ReplicateCheapNodes
from tests.graphs import passes_up_to, rewrite, same_bits, traced


class Net(nn.Module):
    """A value goes to the next stage, one to the stage after it, one to both."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        a = self.a(x)
        mask = a > 0
        b = self.b(a)
        c = self.c(a) + b
        return self.d(c).masked_fill(mask, 0.0) + a


def test_a_boundary_becomes_a_send_and_a_receive(golden):
    model, x = Net(), torch.randn(2, 4)
    gm, steps = run_passes(traced(model, x), passes_up_to(LowerEdges, ("c", "d")))
    golden(rewrite(steps[-1]))
    assert same_bits(model, gm, x)


def test_an_edge_without_a_boundary_is_refused():
    passes = [AssignStages(("c", "d")), ReplicateCheapNodes(), LowerEdges()]
    with pytest.raises(PassError, match="%a of stage 0 is read in stage 1 without a boundary") as e:
        run_passes(traced(Net(), torch.randn(2, 4)), passes)
    assert e.value.hint == "run insert-boundaries"

import pytest
import torch
from torch import nn

from fxpipe.errors import PassError
from fxpipe.manager import run_passes
from fxpipe.passes import AssignStages, InsertBoundaries, ReplicateCheapNodes
from tests.graphs import passes_up_to, rewrite, same_bits, traced


class Net(nn.Module):
    """Stage 1 reads two values of stage 0 in the other order than they are made, one of them twice;
    stage 2 reads values of both."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        a = self.a(x)
        b = self.b(x)
        c = self.c(b * a) + b
        return self.d(c) + a


def test_a_stage_reads_each_value_of_another_through_one_boundary(golden):
    model, x = Net(), torch.randn(2, 4)
    gm, steps = run_passes(traced(model, x), passes_up_to(InsertBoundaries, ("mul", "d")))
    golden(rewrite(steps[-1]))
    assert same_bits(model, gm, x)


def test_edges_without_routes_are_refused():
    passes = [AssignStages(("mul", "d")), ReplicateCheapNodes(), InsertBoundaries()]
    with pytest.raises(PassError, match="%a has 0 routes to stage 1") as caught:
        run_passes(traced(Net(), torch.randn(2, 4)), passes)
    assert caught.value.hint == "run route-edges"

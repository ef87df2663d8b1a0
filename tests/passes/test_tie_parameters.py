import torch
from torch import nn

from fxpipe.ir.annotations import tied_parameters
from fxpipe.manager import run_passes
from fxpipe.passes import AssignStages, ReplicateCheapNodes, TieParameters
from tests.graphs import rewrite, same_bits, traced


class Tied(nn.Module):
    """Ties a weight of two modules, a parameter read twice, and a module called twice."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.twice, self.once = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.rand(4))
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.rand(4))

    def forward(self, ids):
        x = self.twice(self.embed(ids) * self.scale + self.offset)
        x = self.once(x)
        return self.head(self.twice(x) * self.scale + self.offset)


def tie(*cuts):
    model, ids = Tied(), torch.tensor([1, 5])
    passes = [AssignStages(cuts), ReplicateCheapNodes(), TieParameters()]
    gm, steps = run_passes(traced(model, ids), passes)
    assert same_bits(model, gm, ids)
    return gm, steps[2]


def test_a_parameter_of_several_stages_is_noted_once_under_its_first_name(golden):
    golden(rewrite(tie("once", "head")[1]))


def test_what_one_stage_reads_twice_is_not_tied():
    gm, step = tie("head")
    assert tied_parameters(gm) == {"embed.weight": (0, 1)}
    assert "twice" not in step.after.rpartition("return")[2]

import torch
from torch import nn

from fxpipe.manager import run_passes
from fxpipe.passes import AssignStages, ReplicateCheapNodes
from tests.graphs import rewrite, same_bits, traced


def replicate(model, *args, cuts):
    gm, steps = run_passes(traced(model, *args), [AssignStages(cuts), ReplicateCheapNodes()])
    assert same_bits(model, gm, *args)
    return rewrite(steps[1])


class Sized(nn.Module):
    """Three stages read a size that is made from an input."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        rows = x.size(0) * 2
        y = self.a(x).view(rows, 2).view(-1, 4)
        y = self.b(y).view(rows, 2).view(-1, 4)
        return self.c(y).view(rows, 2)


def test_each_stage_makes_the_sizes_it_reads(golden):
    golden(replicate(Sized(), torch.randn(3, 4), cuts=("b", "c")))


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x):
        return self.fc(x * self.scale) * self.scale


def test_each_stage_reads_the_parameters_itself(golden):
    golden(replicate(Shared(), torch.randn(3, 4), cuts=("fc",)))


class Masked(nn.Module):
    """A mask made from an input, and a random one."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, keep):
        mask = keep.logical_not().unsqueeze(1)
        noise = torch.rand_like(x)
        y = self.a(x).masked_fill(mask, 0.0) * noise
        return self.b(y).masked_fill(mask, 0.0) * noise


def test_masks_are_made_where_they_are_read_and_random_numbers_drawn_once(golden):
    golden(replicate(Masked(), torch.randn(3, 4), torch.tensor([True, False, True]), cuts=("b",)))

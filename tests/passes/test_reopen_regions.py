import pytest
import torch
from torch import nn

from fxpipe import compat
from fxpipe.errors import PassError
from fxpipe.manager import run_passes
from fxpipe.passes import AssignStages, ReopenRegions, ReplicateCheapNodes
from tests.graphs import rewrite, same_bits, traced


class Net(nn.Module):
    """The region spans three of four layers."""

    def __init__(self, *regions):
        super().__init__()
        self.regions = regions
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        x = self.layers[0](x)
        for region in self.regions:
            region.__enter__()
        for layer in self.layers[1:]:
            x = layer(x)
        for region in reversed(self.regions):
            region.__exit__(None, None, None)
        return x.float()


def reopen(*regions):
    model, x = Net(*regions), torch.randn(2, 4)
    cuts = AssignStages(("layers.2", "layers.3"))
    gm, steps = run_passes(traced(model, x), [cuts, ReplicateCheapNodes(), ReopenRegions()])
    assert same_bits(model, gm, x)
    return rewrite(steps[2])


def test_an_autocast_region_is_left_before_each_cut_and_entered_behind_it(golden):
    golden(reopen(torch.autocast("cpu", torch.bfloat16)))


def test_gradients_are_off_on_both_sides_of_a_cut_and_on_between_stages(golden):
    golden(reopen(torch.no_grad()))


def test_a_region_inside_another_is_left_first(golden):
    outer = torch.autocast("cpu", torch.bfloat16)
    golden(reopen(outer, torch.autocast("cpu", enabled=False)))


def test_a_region_that_is_left_on_another_stage_is_refused():
    model, x = Net(torch.autocast("cpu", torch.bfloat16)), torch.randn(2, 4)
    gm, _ = run_passes(traced(model, x), [AssignStages(("layers.2",))])
    (end,) = gm.graph.find_nodes(op="call_function", target=compat.exit_autocast)

    class Forgetful(ReopenRegions):
        def run(self, gm):
            return gm

    with pytest.raises(PassError, match=f"%{end.name}"):
        run_passes(gm, [Forgetful()])

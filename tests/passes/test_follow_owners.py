import pytest
import torch
from torch import nn

from fxpipe.errors import PassError
from fxpipe.manager import run_passes
from fxpipe.passes import FollowOwners
from tests.graphs import rewrite, same_bits, traced


class Net(nn.Module):
    """Skips its dropout in eval mode; may run its layers the other way round there."""

    def __init__(self, turned=False):
        super().__init__()
        self.turned = turned
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        layers = [self.a, self.b, self.c]
        if not self.training and self.turned:
            layers.reverse()
        for layer in layers:
            x = torch.relu(layer(x))
            if self.training:
                x = nn.functional.dropout(x, 0.5)
        return x


OWNERS = {
    f"{layer}.{kind}": (stage,) for stage, layer in enumerate("abc") for kind in ("weight", "bias")
}


def follow(cuts, turned=False, owners=OWNERS):
    model, x = Net(turned).eval(), torch.randn(2, 4)
    gm, steps = run_passes(traced(model, x), [FollowOwners(3, owners, cuts)])
    assert same_bits(model, gm, x)
    return steps[0]


def test_stages_keep_their_parameters_and_cut_where_the_first_graph_was_cut(golden):
    golden(rewrite(follow(cuts=("relu", "relu_1"))))


def test_a_cut_that_this_graph_does_not_have_stands_as_late_as_it_can(golden):
    golden(rewrite(follow(cuts=("dropout", "dropout_1"))))


def test_what_several_stages_hold_runs_on_the_one_that_keeps_the_order(golden):
    tied = {name: (1,) if name.startswith("b") else (0, 2) for name in OWNERS}
    golden(rewrite(follow(cuts=("relu", "relu_1"), turned=True, owners=tied)))


def test_a_mode_that_reads_the_stages_in_another_order_is_refused():
    with pytest.raises(PassError) as caught:
        follow(cuts=("relu", "relu_1"), turned=True)
    assert "stage 1 cannot keep its parameters in this mode" in caught.value.problem
    assert "another order" in caught.value.problem

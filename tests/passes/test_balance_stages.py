import itertools

import pytest
import torch
from torch import nn

from fxpipe.errors import PassError
from fxpipe.ir.annotations import cost_of, require_stage
from fxpipe.ir.cuts import placed_nodes
from fxpipe.manager import run_passes
from fxpipe.passes import BalanceStages
from tests.graphs import rewrite, same_bits, traced


def uneven():
    """The first layer has as many parameters as all others, the last takes as long."""
    sizes = [8, 32, 8, 8, 8, 8]
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*layers), torch.randn(2, 8)


def balance(stages, by):
    model, x = uneven()
    gm, steps = run_passes(traced(model, x), [BalanceStages(stages, by=by)])
    assert same_bits(model, gm, x)
    return gm, steps[0]


def test_parameters_are_balanced_by_their_bytes(golden):
    golden(rewrite(balance(3, "parameters")[1]))


def test_a_wide_value_is_not_sent_where_a_narrow_one_can_be(golden):
    class Hourglass(nn.Module):
        """The even cut is where the value is widest."""

        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            y = torch.tanh(self.fc(x))
            wide = y.repeat(1, 4096)
            return torch.tanh(wide.sum(dim=1))

    model, x = Hourglass(), torch.randn(2, 8)
    gm, steps = run_passes(traced(model, x), [BalanceStages(2)])
    golden(rewrite(steps[0]))
    assert same_bits(model, gm, x)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_no_other_cuts_make_the_largest_stage_smaller(stages):
    gm, _ = balance(stages, "parameters")
    placed = placed_nodes(gm)
    costs = [cost_of(n).parameter_bytes for n in placed]

    def largest(starts):
        bounds = [0, *starts, len(costs)]
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(bounds))

    stage = [require_stage(n) for n in placed]
    chosen = [i for i in range(1, len(placed)) if stage[i - 1] != stage[i]]
    every = itertools.combinations(range(1, len(placed)), stages - 1)
    assert largest(chosen) == min(map(largest, every))


def test_more_stages_than_places_are_refused_with_the_number_there_is():
    with pytest.raises(PassError) as caught:
        balance(6, "time")
    assert "6 stages need 5 cuts, but the model has 4 places to cut" in caught.value.problem
    assert caught.value.hint == "use stages <= 5"

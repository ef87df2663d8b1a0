import pytest
import torch
from torch import nn

from fxpipe.errors import PassError
from fxpipe.manager import run_passes
from fxpipe.passes import AssignStages
from tests.graphs import rewrite, same_bits, traced


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return torch.relu(self.fc(x)) + x


class Blocks(nn.Module):
    """``blocks.1`` is a prefix of ``blocks.10`` as text, not as a module."""

    def __init__(self, count=3):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        a, b = x.chunk(2, dim=1)
        return a * b


def assign(*cuts, count=3):
    model, x = Blocks(count), torch.randn(2, 4)
    gm, steps = run_passes(traced(model, x), [AssignStages(cuts)])
    assert same_bits(model, gm, x)
    return steps[0]


def test_a_stage_starts_at_the_first_node_of_a_module(golden):
    golden(rewrite(assign("blocks.1", "blocks.2.fc")))


def test_a_stage_starts_at_a_node(golden):
    golden(rewrite(assign("relu_1")))


def test_cuts_may_be_named_in_any_order():
    assert assign("blocks.2", "blocks.1").after == assign("blocks.1", "blocks.2").after


def test_the_name_of_a_module_is_no_prefix_of_another():
    after = assign("blocks.10", count=11).after
    assert "stage 1\n  blocks_10_fc" in after


def failing(*cuts):
    with pytest.raises(PassError) as caught:
        assign(*cuts)
    return caught.value


def test_a_cut_that_names_nothing_is_reported_with_the_names():
    error = failing("blocks.7")
    assert "cut 'blocks.7' names no module and no node" in error.problem
    assert error.hint == (
        "modules are: blocks.0, blocks.0.fc, blocks.1, blocks.1.fc, blocks.2, blocks.2.fc; "
        "nodes are: blocks_0_fc, ..., mul"
    )


def test_a_cut_at_the_start_of_the_model_leaves_a_stage_empty():
    error = failing("blocks.0")
    assert "cut 'blocks.0' leaves a stage without nodes: the model starts there too" in str(error)


def test_two_cuts_at_one_place_leave_a_stage_empty():
    error = failing("blocks.1", "blocks_1_fc")
    assert "cut 'blocks_1_fc' leaves a stage without nodes" in error.problem
    assert "cut 'blocks.1' starts there too" in error.problem


def test_a_cut_inside_of_what_stays_together_is_told_the_place_before():
    error = failing("getitem_1")
    assert "no stage can start at cut 'getitem_1': %chunk is a container" in error.problem
    assert "test_assign_stages.py" in error.at
    assert error.hint == "the place before it is %chunk"

import torch
from torch import nn

from fxpipe.ir.annotations import (
    mutates_of,
    require_stage,
    result_is_of,
    set_mutates,
    set_result_is,
    stage_count,
)
from fxpipe.ir.cuts import placed_nodes
from fxpipe.ir.placement import place, read_instead
from tests.graphs import traced


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale, self.unread = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)

    def forward(self, x, y):
        return self.b(torch.tanh(self.a(x))) * self.scale + y


def test_what_is_free_belongs_to_the_first_stage_that_reads_it_and_the_output_to_the_last():
    gm = traced(Net(), torch.randn(2, 4), torch.randn(2, 4))
    starts = [[n.name for n in placed_nodes(gm)].index("b")]
    place(gm, starts)
    stages = {n.name: require_stage(n) for n in gm.graph.nodes}
    assert stages == {
        "x": 0,
        "y": 1,
        "a": 0,
        "tanh": 0,
        "b": 1,
        "scale": 1,
        "mul": 1,
        "add": 1,
        "output": 1,
    }
    assert stage_count(gm) == 2


def test_a_reader_reads_another_node_also_in_what_is_noted_of_its_writes():
    gm = traced(Net(), torch.randn(2, 4), torch.randn(2, 4))
    nodes = {n.name: n for n in gm.graph.nodes}
    set_mutates(nodes["tanh"], ("a", "x"))
    set_result_is(nodes["tanh"], "a")
    read_instead(nodes["tanh"], nodes["a"], nodes["y"])
    assert nodes["tanh"].args == (nodes["y"],)
    assert mutates_of(nodes["tanh"]) == ("y", "x")
    assert result_is_of(nodes["tanh"]) == "y"

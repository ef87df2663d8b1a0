import torch
from torch import nn

from fxpipe.ir.edges import attribute, cross_stage_edges, feeds_output, needs_gradient, state_names
from fxpipe.manager import run_passes
from fxpipe.passes import ReplicateCheapNodes
from tests.graphs import passes_up_to, traced


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x, ids):
        a = self.a(x)
        rows = a.size(0)
        first, second = a.chunk(2, dim=1)
        b = self.b(torch.cat([second, first], dim=1)) + ids.unsqueeze(1)
        zeros = torch.zeros(rows, 4)
        zeros[:, :2] = b[:, :2]
        unread = torch.empty(rows, 4)
        unread[:, :2] = self.b(a)[:, :2]
        return self.norm(zeros) * a


def nodes_of(gm):
    return {n.name: n for n in gm.graph.nodes}


def arguments():
    return torch.randn(2, 4), torch.tensor([1, 2])


def test_edges_are_tensors_of_other_stages_but_not_inputs_and_sizes():
    gm, _ = run_passes(traced(Net(), *arguments()), passes_up_to(ReplicateCheapNodes, ("b", "mul")))
    edges = [
        (e.producer.name, [r.name for r in e.readers], e.source, e.target)
        for e in cross_stage_edges(gm)
    ]
    assert edges == [
        ("a", ["b_1"], 0, 1),
        ("a", ["mul"], 0, 2),
        ("cat", ["b"], 0, 1),
        ("norm", ["mul"], 1, 2),
    ]


def test_a_container_needs_a_gradient_if_a_part_of_it_does():
    nodes = nodes_of(traced(Net(), *arguments()))
    needed = {name for name, n in nodes.items() if n.op != "output" and needs_gradient(n)}
    assert {"a", "chunk", "getitem", "b", "norm", "mul"} <= needed
    assert not needed & {"x", "ids", "size", "zeros", "unsqueeze"}


def test_a_path_to_the_output_leads_through_containers_and_writes():
    gm = traced(Net(), *arguments())
    found = {n.name for n in feeds_output(gm)}
    assert {"a", "chunk", "cat", "b", "setitem", "norm", "mul"} <= found
    assert not found & {"b_1", "setitem_1", "unsqueeze", "x"}


def test_a_module_reads_what_is_inside_of_it_and_an_attribute_itself():
    gm = traced(Net(), *arguments())
    assert list(state_names(gm, nodes_of(gm)["norm"])) == [
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]
    assert list(state_names(gm, nodes_of(gm)["x"])) == []


def test_an_attribute_is_found_at_its_dotted_path():
    model = Net()
    assert attribute(model, "norm.running_var") is model.norm.running_var

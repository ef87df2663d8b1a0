"""Where a cut may stand: for each place that is refused, the reason that is given."""

import pytest
import torch
from torch import nn

from fxpipe.ir.cuts import cut_reasons, free_nodes, placed_nodes
from fxpipe.manager import run_passes
from fxpipe.passes import Normalize
from tests.graphs import traced


def places(model, *args):
    """Each placed node with the reason why no stage may start there."""
    gm, _ = run_passes(traced(model, *args), [Normalize()])
    nodes = placed_nodes(gm)
    return dict(zip([n.name for n in nodes], cut_reasons(gm), strict=True))


class Written(nn.Module):
    """Writes what `names` says are other names of it."""

    def __init__(self, make):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.make = make

    def forward(self, x):
        return self.b(self.make(self.a(x)))


def test_a_tensor_with_one_name_may_be_cut_before_and_after_it_is_written():
    found = places(Written(torch.relu_), torch.randn(2, 4))
    assert found == {"a": None, "relu": None, "b": None}


def refused(make):
    return [n for n, reason in places(Written(make), torch.randn(2, 4)).items() if reason]


def test_a_view_and_its_base_stay_together_until_the_write_and_its_last_reader():
    def make(y):
        view = y[:, :2]
        z = torch.tanh(y) * 2
        view.add_(1)
        return y + z

    reasons = places(Written(make), torch.randn(2, 4))
    assert [n for n, r in reasons.items() if r] == ["tanh", "mul", "add_", "add"]
    assert reasons["add_"] == "%add_ writes a tensor that has other names"


def test_a_view_made_of_the_only_name_that_crosses_may_be_cut_off():
    def make(y):
        view = y[:, :2]
        view.add_(1)
        return y * 2

    assert refused(make) == ["add_", "mul"]


def test_a_chain_of_views_counts_as_another_name_from_its_first_on():
    def make(y):
        first = y.detach()
        second = first.detach()
        torch.relu_(second)
        return y * 2

    assert refused(make) == ["detach_1", "relu", "mul"]


def test_a_write_that_returns_nothing_stays_with_what_reads_it_later():
    def make(y):
        y[:, 0] = 1
        z = torch.tanh(y)
        return z + y

    assert refused(make) == ["tanh", "add"]


def test_views_that_nobody_writes_are_cut_apart():
    assert refused(lambda y: y[:, :2].t().t().repeat(1, 2) + y) == []


def test_what_reads_an_input_before_it_is_written_stays_with_the_write():
    class Writing(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            y = self.a(x.detach().clone())
            x.add_(1)
            return self.b(y)

    reasons = places(Writing(), torch.randn(2, 4))
    assert [n for n, r in reasons.items() if r] == ["clone", "a", "add_"]


def test_a_container_stays_with_what_unpacks_it():
    reasons = places(Written(lambda y: torch.cat(y.chunk(2, dim=1), dim=1)), torch.randn(2, 4))
    assert {n for n, r in reasons.items() if r} == {"getitem", "getitem_1"}
    assert reasons["getitem"] == "%chunk is a container of tensors"


class Counting(nn.Module):
    """Reads a view of its counter long after it was written, by itself or inside a module."""

    def __init__(self, norm):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4) if norm else None
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x):
        x = self.a(x)
        if self.norm is not None:
            x = self.norm(x)
            calls = self.norm.running_mean
        else:
            self.calls[:2].add_(1)
            calls = self.calls
        return self.b(x) + (calls * 2)


@pytest.mark.parametrize("norm", [False, True])
def test_a_buffer_that_is_written_stays_with_all_that_reads_it(norm):
    reasons = places(Counting(norm), torch.randn(3, 4))
    name = "norm.running_mean" if norm else "calls"
    assert reasons["b"] == f"buffer {name} is written"
    assert reasons["mul"] == f"buffer {name} is written"
    assert reasons["add"] is None
    assert reasons["norm" if norm else "getitem"] is None


def test_inputs_sizes_and_masks_made_of_inputs_belong_to_no_place():
    class Masking(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

        def forward(self, x, keep):
            mask = keep.logical_not().unsqueeze(1)
            scale = self.scale * 2
            noise = torch.rand_like(x)
            y = self.a(x).view(x.size(0) * 2, 2).view_as(x)
            return y.masked_fill(mask, 0.0) * scale * noise

    gm = traced(Masking(), torch.randn(2, 4), torch.tensor([True, False]))
    free = [n.name for n in gm.graph.nodes if n in free_nodes(gm)]
    assert free == ["x", "keep", "logical_not", "unsqueeze", "scale", "size", "mul_1"]

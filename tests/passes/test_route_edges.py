import pytest
import torch
from torch import nn

from fxpipe.errors import PassError
from fxpipe.manager import run_passes
from fxpipe.passes import AssignStages, RouteEdges
from tests.graphs import passes_up_to, rewrite, same_bits, traced


def routed(model, *args, cuts, route=None):
    passes = passes_up_to(RouteEdges, cuts)
    if route is not None:
        passes[-1] = route
    gm, steps = run_passes(traced(model, *args), passes)
    assert same_bits(model, gm, *args)
    return rewrite(steps[-1])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))


class Skipping(Net):
    """Three stages read what the first makes, not all of them with a gradient."""

    def forward(self, x):
        a = self.a(x)
        b = self.b(a)
        c = self.c(b) + a.detach()
        return self.d(c) * a


def test_a_value_goes_to_every_reader_and_its_gradient_from_reader_to_reader(golden):
    golden(routed(Skipping(), torch.randn(2, 4), cuts=("b", "c", "d")))


class Selecting(Net):
    """Stage 1 reads a value that needs no gradient, and one from which none leads to the output."""

    def forward(self, x):
        a = self.a(x)
        mask = a > 0
        with torch.no_grad():
            count = self.b(a).sum()
        return self.c(a * 2).masked_fill(mask, 0.0) * count


def test_no_gradient_comes_back_where_the_model_has_none(golden):
    golden(routed(Selecting(), torch.randn(2, 4), cuts=("b", "c")))


class Writing(Net):
    """Stage 1 writes, through a view, what it received, and stage 2 a value without a gradient."""

    def forward(self, x):
        a = self.a(x)
        zeros = torch.zeros_like(a) + a.detach()
        first = a[:, :2]
        first.mul_(2)
        b = self.b(first.repeat(1, 2))
        zeros.add_(1)
        return self.c(b) + zeros


def test_a_reader_that_writes_what_needs_a_gradient_works_on_a_copy(golden):
    golden(routed(Writing(), torch.randn(2, 4), cuts=("getitem", "add_")))


class Unpacking(Net):
    """The gradient of what crosses comes through a container."""

    def forward(self, x):
        first, second = self.a(x).chunk(2, dim=1)
        return self.b(torch.cat([second, first], dim=1))


def test_a_gradient_comes_back_through_a_container(golden):
    golden(routed(Unpacking(), torch.randn(2, 4), cuts=("chunk",)))


class Tied(Net):
    def forward(self, x):
        return self.a(self.c(self.a(self.b(self.a(x)))))


@pytest.mark.parametrize("limit", [64, 63])
def test_the_gradient_of_a_small_tied_parameter_goes_from_stage_to_stage(golden, limit):
    route = RouteEdges(chained_bytes=limit)
    golden(routed(Tied(), torch.randn(2, 4), cuts=("b", "c"), route=route))


def test_a_graph_without_stages_is_refused():
    with pytest.raises(PassError, match="has no stage") as caught:
        run_passes(traced(Skipping(), torch.randn(2, 4)), [RouteEdges()])
    assert caught.value.hint == "run assign-stages or balance-stages first"


def test_an_edge_that_goes_back_is_refused():
    gm, _ = run_passes(traced(Skipping(), torch.randn(2, 4)), [AssignStages(("b", "c"))])
    next(n for n in gm.graph.nodes if n.name == "a").meta["fxpipe.stage"] = 2
    with pytest.raises(PassError, match="edge %a -> %b goes back from stage 2 to stage 1"):
        run_passes(gm, [RouteEdges()])

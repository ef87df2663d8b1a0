"""What crosses has the shape, the dtype and the memory order that a real run gives it."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import fx, nn

from fxpipe.runtime.stage import TensorLayout, layout_of
from fxpipe.shapes import ShapeProbe, edge_names
from fxpipe.split import split_stages
from tests.graphs import lowered, places_to_cut, traced
from tests.random_models import RandomModel, batch, recipes


def probe_of(model, *args, cuts):
    """The probe for a model cut so, the edges, and the sizes it knows."""
    graph = lowered(model, *args, cuts=cuts)
    sizes = list(dict.fromkeys(n for s in split_stages(graph) for n in s.sizes))
    names = edge_names(graph)
    return ShapeProbe(traced(model, *args), names, sizes, training=True), names, sizes


class Values(fx.Interpreter):
    """Notes the value of every node at the moment it is made."""

    def run_node(self, n):
        value = super().run_node(n)
        self.found[n.name] = layout_of(value) if isinstance(value, torch.Tensor) else value
        return value

    def values(self, *args):
        self.found = {}
        self.run(*args)
        return self.found


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_layouts_are_those_of_a_real_run_for_any_number_of_rows(data):
    model, args = RandomModel(data.draw(recipes())), batch(4)
    places = places_to_cut(model, *args)
    chosen = set(data.draw(st.permutations(places))[: data.draw(st.integers(1, 4))])
    cuts = tuple(place for place in places if place in chosen)
    probe, edges, sizes = probe_of(model, *args, cuts=cuts)
    for rows in data.draw(st.lists(st.integers(2, 9), min_size=1, max_size=3)):
        layout = probe.layout(batch(rows))
        real = Values(traced(model, *args)).values(*batch(rows))
        assert layout.edges == tuple(real[name] for name in edges)
        assert layout.sizes == tuple(real[name] for name in sizes)


class Conv(nn.Module):
    """Its activations are channels-last if the batch is."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3)

    def forward(self, x):
        y = torch.relu(self.a(x))
        rows, _, height, _ = y.shape
        return self.b(y).sum(dim=(1, 3)).view(rows, height - 2)


def test_a_channels_last_image_stays_so_and_a_size_is_that_of_the_microbatch():
    probe, _, _ = probe_of(Conv(), torch.randn(2, 3, 8, 8), cuts=("b",))
    image = torch.randn(5, 3, 6, 9)
    assert probe.layout([image]).edges == (TensorLayout((5, 4, 6, 9), torch.float32),)
    image = image.to(memory_format=torch.channels_last)
    (edge,) = probe.layout([image]).edges
    assert edge.order == (0, 2, 3, 1)
    assert edge.shape == (5, 4, 6, 9)


def test_a_shape_is_propagated_once():
    probe, _, _ = probe_of(Conv(), torch.randn(2, 3, 8, 8), cuts=("b",))
    first = probe.layout([torch.randn(5, 3, 6, 9)])
    assert probe.layout([torch.randn(5, 3, 6, 9)]) is first
    assert probe.layout([torch.randn(4, 3, 6, 9)]) is not first


def test_the_shape_not_used_for_longest_is_forgotten():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    probe, _, _ = probe_of(model, torch.ones(1, 1), cuts=("1",))
    first, second = probe.layout([torch.ones(2, 1)]), probe.layout([torch.ones(3, 1)])
    for rows in range(4, 67):
        probe.layout([torch.ones(rows, 1)])
        assert probe.layout([torch.ones(2, 1)]) is first
    assert probe.layout([torch.ones(3, 1)]) is not second


def strided(*sizes, of=(4, 6)):
    return torch.arange(24.0).view(of).as_strided(*sizes)


TENSORS = {
    "contiguous": strided((4, 6), (6, 1)),
    "transposed": strided((6, 4), (1, 6)),
    "with gaps": strided((4, 3), (6, 1)),
    "with gaps in both": strided((2, 3), (12, 2), 1),
    "transposed with gaps": strided((3, 4), (1, 6)),
    "expanded": strided((4, 6), (1, 0)),
    "expanded twice": strided((2, 3, 4), (0, 1, 0)),
    "overlapping": strided((4, 3), (1, 1)),
    "one row": strided((1, 6), (99, 1)),
    "one element": strided((1, 1), (3, 0)),
    "empty": strided((0, 6), (6, 1)),
    "0-dim": strided((), ()),
    "permuted": torch.randn(2, 3, 4, 5).permute(0, 2, 3, 1),
}


@pytest.mark.parametrize("value", TENSORS.values(), ids=TENSORS)
def test_a_tensor_arrives_with_the_strides_it_had(value):
    layout = layout_of(value)
    buffer, view = layout.empty(value.device)
    sent = layout.for_transfer(value)
    assert sent.is_contiguous()
    assert (buffer.shape, buffer.dtype) == (sent.shape, sent.dtype)
    buffer.copy_(sent)
    found = layout.with_gaps(view)
    assert torch.equal(found, value)
    seen = [s for n, s in zip(value.shape, found.stride(), strict=True) if n > 1]
    wanted = [s for n, s in zip(value.shape, value.stride(), strict=True) if n > 1]
    overlaps = value is TENSORS["overlapping"]
    assert (found.is_contiguous() if overlaps else seen == wanted) or 0 in value.shape


def test_a_gradient_that_does_not_exist_is_zeros_in_the_order_of_the_transfer():
    layout = layout_of(TENSORS["transposed"])
    assert torch.equal(layout.zeros(torch.device("cpu")), torch.zeros(4, 6))

import operator

import pytest
import torch
from torch import nn

from fxpipe.errors import PassError
from fxpipe.manager import run_passes
from fxpipe.passes import Normalize
from tests.graphs import rewrite, same_bits, traced


class Writing(nn.Module):
    """Reads a tensor before and after it is written in place."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        y = self.fc(x)
        before = torch.tanh(y.detach())
        y.add_(1)
        y.mul_(2)
        return torch.relu(y) + before


def test_what_reads_a_tensor_after_a_write_reads_the_write(golden):
    model, x = Writing(), torch.randn(2, 4)
    gm, steps = run_passes(traced(model, x), [Normalize()])
    golden(rewrite(steps[0]))
    assert same_bits(model, gm, x)


class Halves(nn.Module):
    def forward(self, x):
        a, b = x.chunk(2, dim=1)
        return torch.tanh(a) * b


def test_unpacking_moves_up_to_what_it_unpacks(golden):
    model, x = Halves(), torch.randn(2, 4)
    gm = traced(model, x)
    tanh = next(iter(gm.graph.find_nodes(op="call_function", target=torch.tanh)))
    _, second = gm.graph.find_nodes(op="call_function", target=operator.getitem)
    tanh.append(second)
    gm, steps = run_passes(gm, [Normalize()])
    golden(rewrite(steps[0]))
    assert same_bits(model, gm, x)


class Stopping(nn.Module):
    def forward(self, x):
        with torch.no_grad():
            y = x * 2
        return y + x


def test_a_graph_that_never_runs_backward_switches_no_gradients(golden):
    model, x = Stopping(), torch.randn(2, 4)
    gm, steps = run_passes(traced(model, x), [Normalize(training=False)])
    golden(rewrite(steps[0]))
    assert same_bits(model, gm, x)


def test_a_graph_that_runs_backward_keeps_its_gradient_switches():
    _, steps = run_passes(traced(Stopping(), torch.randn(2, 4)), [Normalize(training=True)])
    assert not steps[0].modified


def test_a_node_without_a_value_is_named():
    gm = traced(Halves(), torch.randn(2, 4))
    next(iter(gm.graph.find_nodes(op="call_function", target=torch.tanh))).meta.clear()
    with pytest.raises(PassError, match="node %tanh has no value"):
        run_passes(gm, [Normalize()])

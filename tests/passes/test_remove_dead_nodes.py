import torch
from torch import nn

from fxpipe.manager import run_passes
from fxpipe.passes import RemoveDeadNodes
from tests.graphs import rewrite, same_bits, traced


class Wasteful(nn.Module):
    """Of what nobody reads, a module, a function and a chain may go."""

    def __init__(self):
        super().__init__()
        self.fc, self.unread = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.unread(x)
        torch.relu(torch.tanh(x))
        self.norm(x)
        self.drop(x)
        self.calls.add_(1)
        y = self.fc(x)
        y.add_(1)
        return y


def test_what_writes_or_draws_random_numbers_stays(golden):
    model, x = Wasteful(), torch.randn(2, 4)
    gm, steps = run_passes(traced(model, x), [RemoveDeadNodes()])
    golden(rewrite(steps[0]))
    assert same_bits(model, gm, x)

"""What needs a CUDA device: several stages of one process on it, and mixed precision."""

import copy

import pytest
import torch
from torch import nn

import fxpipe

pytestmark = pytest.mark.gpu


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.norm = nn.BatchNorm1d(64)
        self.out = nn.Linear(64, 8)

    def forward(self, x):
        first = x
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.out(self.norm(x + first))


def close(pipe, plain, x, y, loss):
    """Whether a step has the gradients of the plain model over the same microbatches."""
    result = pipe.step(x, target=y)
    total = 0.0
    for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
        part = loss(plain(a), b) / 4
        part.backward()
        total += part.item()
    assert abs(result.loss.item() - total) < 1e-4
    wanted = dict(plain.named_parameters())
    return all(
        torch.allclose(p.grad, wanted[n].grad, rtol=1e-3, atol=1e-5)
        for n, p in pipe.named_parameters()
    )


def test_several_stages_of_one_process_share_a_device():
    torch.manual_seed(0)
    model = Net().cuda()
    plain = copy.deepcopy(model)
    x, y = torch.randn(32, 64).cuda(), torch.randint(0, 8, (32,)).cuda()
    loss = nn.functional.cross_entropy
    pipe = fxpipe.compile(model, 4, loss=loss, microbatches=4, example_inputs=((x,), {}))
    assert close(pipe, plain, x, y, loss)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_the_scaler_trains(dtype):
    torch.manual_seed(0)
    x, y = torch.randn(32, 64).cuda(), torch.randint(0, 8, (32,)).cuda()
    loss = nn.functional.cross_entropy
    pipe = fxpipe.compile(Net().cuda(), 4, loss=loss, microbatches=4, example_inputs=((x,), {}))
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    scaler = pipe.grad_scaler(enabled=dtype is torch.float16)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=dtype):
            losses.append(pipe.step(x, target=y, scaler=scaler).loss.item())
        scaler.step(optimizer)
        scaler.update()
    assert losses[-1] < losses[0]

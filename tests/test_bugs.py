"""One test a bug, headed by its story: what the user did, what went wrong, what is right."""

import copy

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.errors import InputError


def gradients_equal(model, pipe, x, y, loss, microbatches):
    """Whether the pipeline's gradients are those of the plain model over the same microbatches."""
    plain = copy.deepcopy(model)
    rows = x.shape[0]
    for a, b in zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True):
        (loss(plain(a.clone()), b) * (len(a) / rows)).backward()
    pipe.step(x, target=y)
    return all(
        torch.equal(p.grad, q.grad)
        for p, q in zip(pipe.parameters(), plain.parameters(), strict=True)
    )


def test_a_model_that_writes_its_input_in_place_trains():
    """A model begins with ``x.mul_(2)``.

    Microbatches are views of the batch and shared its version counter, so the write of the second
    made backward of the first fail. Right: the numbers of the plain model, and the batch left as it
    was.
    """

    class Doubling(nn.Module):
        def forward(self, x):
            return x.mul_(2)

    torch.manual_seed(0)
    model = nn.Sequential(Doubling(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    before = x.clone()
    loss = nn.functional.mse_loss
    pipe = fxpipe.compile(model, 2, loss=loss, microbatches=4, example_inputs=((x,), {}))
    assert gradients_equal(model, pipe, x, y, loss, 4)
    assert torch.equal(x, before)


def test_a_last_batch_that_the_model_refuses_is_told_with_the_module_and_its_line():
    """The last batch of an epoch has six rows, and makes microbatches of one.

    Batch norm refuses a single row. The error was a bare ``ValueError`` out of the shape
    propagation. Right: it names the module and the user's line, as at compile.
    """
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    x, y = torch.randn(12, 4), torch.randn(12, 2)
    loss = nn.functional.mse_loss
    pipe = fxpipe.compile(model, 2, loss=loss, microbatches=6, example_inputs=((x,), {}))
    with pytest.raises(InputError, match="more than 1 value per channel") as caught:
        pipe.step(x[:6], target=y[:6])
    assert "BatchNorm1d" in caught.value.at

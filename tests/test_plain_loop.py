"""The plain training loop: a call, a loss computed by the user, ``backward``."""

import copy

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe import FxpipeError
from tests.ranks import run_ranks


class Net(nn.Module):
    """Several outputs: two of the last stage, one of an early one, a 0-dim one and a None."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.out = nn.Linear(6, 2)

    def forward(self, x):
        hidden = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            hidden.append(x)
        return {"y": self.out(x), "early": hidden[1], "mean": x.mean(), "nothing": None}


def criterion(output, target):
    difference = nn.functional.mse_loss(output["y"], target)
    return difference + output["early"].pow(2).mean() + output["mean"] ** 2


def made(seed=0):
    torch.manual_seed(seed)
    model = Net().double()
    return model, torch.randn(10, 6).double(), torch.randn(10, 2).double()


def train(pipe, x, y, steps=3):
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = criterion(pipe(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def close(a, b):
    return all(abs(i - j) <= 1e-9 for i, j in zip(a, b, strict=True))


def test_the_same_loop_trains_a_pipeline_and_a_plain_model_alike():
    model, x, y = made()
    plain = copy.deepcopy(model)
    pipe = fxpipe.compile(model, 3, microbatches=4, example_inputs=((x,), {}))
    assert close(train(pipe, x, y), train(plain, x, y))
    for name, parameter in plain.named_parameters():
        assert torch.allclose(dict(pipe.named_parameters())[name], parameter, rtol=0, atol=1e-9)


def test_the_plain_loop_runs_the_same_code_on_every_rank():
    model, x, y = made()
    plain = copy.deepcopy(model)
    want = train(plain, x, y)

    def rank(number):
        pipe = fxpipe.compile(model, 4, microbatches=4, example_inputs=((x,), {}))
        assert close(train(pipe, x, y), want)
        expected = dict(plain.named_parameters())
        for name, parameter in pipe.named_parameters():
            assert torch.allclose(parameter, expected[name], rtol=0, atol=1e-9), name

    run_ranks(4, rank)


def test_gradients_of_two_backwards_add_up():
    model, x, y = made()
    plain = copy.deepcopy(model)
    pipe = fxpipe.compile(model, 3, microbatches=2, example_inputs=((x,), {}))
    for _ in range(2):
        criterion(pipe(x), y).backward()
        criterion(plain(x), y).backward()
    for (name, got), want in zip(pipe.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(got.grad, want.grad, rtol=0, atol=1e-9), name


def test_a_forward_without_backward_leaves_nothing_behind():
    model, x, y = made()
    pipe = fxpipe.compile(model, 3, microbatches=2, example_inputs=((x,), {}))
    pipe(x)
    criterion(pipe(x), y).backward()
    once = [p.grad.clone() for p in pipe.parameters()]
    pipe.zero_grad()
    criterion(pipe(x), y).backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(once, pipe.parameters(), strict=True))


def test_the_output_of_an_earlier_call_is_refused_in_backward():
    model, x, y = made()
    pipe = fxpipe.compile(model, 3, microbatches=2, example_inputs=((x,), {}))
    first = pipe(x)
    pipe(x)
    with pytest.raises(FxpipeError, match="the last call"):
        criterion(first, y).backward()


def test_a_call_without_gradients_has_none_to_give():
    model, x, _ = made()
    pipe = fxpipe.compile(model, 3, microbatches=2, example_inputs=((x,), {}))
    with torch.no_grad():
        assert not pipe(x)["y"].requires_grad
    assert pipe(x)["y"].requires_grad
    assert not pipe.eval()(x)["y"].requires_grad


def test_step_and_the_plain_loop_give_the_same_gradients():
    model, x, y = made()
    pipe = fxpipe.compile(model, 3, microbatches=5, loss=criterion, example_inputs=((x,), {}))
    pipe.step(x, target=y)
    # the square of the batch's mean is no mean over microbatches: leave it out of the comparison
    stepped = {n: p.grad.clone() for n, p in pipe.named_parameters() if n.startswith("out")}
    pipe.zero_grad()
    nn.functional.mse_loss(pipe(x)["y"], y).backward()
    for name, gradient in stepped.items():
        assert torch.allclose(dict(pipe.named_parameters())[name].grad, gradient, atol=1e-9)

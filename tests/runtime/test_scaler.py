"""The gradient scaler: all ranks step, or none does."""

import torch
from torch import nn

import fxpipe
from tests.ranks import run_ranks


def pipeline(x, stages=2):
    torch.manual_seed(0)
    layers = [m for _ in range(3) for m in (nn.Linear(4, 4), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(4, 1))
    loss = lambda output, target: output.mean()  # noqa: E731
    return fxpipe.compile(model, stages, loss=loss, microbatches=4, example_inputs=((x,), {}))


def values(pipe):
    return [p.detach().clone() for p in pipe.parameters()]


def moved(pipe, before):
    return [not torch.equal(a, b) for a, b in zip(before, pipe.parameters(), strict=True)]


def test_an_infinity_on_one_rank_skips_the_step_on_all():
    def rank(number):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
        pipe = pipeline(x)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        scaler = pipe.grad_scaler(init_scale=4.0)
        before = values(pipe)
        pipe.step(x, scaler=scaler)
        if number == 1:
            next(pipe.parameters()).grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        assert not any(moved(pipe, before))
        assert scaler.get_scale() == 2.0
        optimizer.zero_grad()
        pipe.step(x, scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
        assert all(moved(pipe, before))
        assert scaler.get_scale() == 2.0

    run_ranks(2, rank)


def test_a_rank_without_gradients_takes_part():
    def rank(number):
        x = torch.randn(8, 4)
        pipe = pipeline(x)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        scaler = pipe.grad_scaler(init_scale=4.0)
        pipe.step(x, scaler=scaler)
        if number == 0:
            pipe.zero_grad()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 4.0

    run_ranks(2, rank)


def test_the_scale_is_in_the_gradients_and_not_in_the_loss():
    x = torch.randn(8, 4)
    plain, scaled = pipeline(x), pipeline(x)
    scaler = scaled.grad_scaler(init_scale=8.0)
    assert torch.equal(plain.step(x).loss, scaled.step(x, scaler=scaler).loss)
    for a, b in zip(plain.parameters(), scaled.parameters(), strict=True):
        assert torch.equal(a.grad * 8, b.grad)
    optimizer = torch.optim.SGD(scaled.parameters(), lr=0.1)
    scaler.unscale_(optimizer)
    for a, b in zip(plain.parameters(), scaled.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_torchs_scaler_works_in_the_plain_loop():
    x = torch.randn(8, 4)
    pipe = pipeline(x)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    scaler = pipe.grad_scaler(init_scale=8.0)
    before = values(pipe)
    scaler.scale(pipe(x).mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(moved(pipe, before))

"""The check of the stages against the plain model when a model is compiled."""

import copy
import logging

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.errors import TraceError
from fxpipe.self_check import is_small


class Counting(nn.Module):
    """Its result depends on how often it was called, which no graph shows."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        scale = 1.0 if self.calls == 1 else 3.0
        return self.b(torch.tanh(self.a(x) * scale))


class Dropping(nn.Module):
    """A gradient hook on an activation: the trace loses it."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.a(x)
        if type(hidden) is torch.Tensor and hidden.requires_grad and not hidden.is_leaf:
            hidden = hidden.detach() * 2 - hidden.detach() + 0 * hidden
        return self.b(hidden)


def compile_(model, x, **options):
    return fxpipe.compile(model, 2, microbatches=2, example_inputs=((x,), {}), **options)


def test_a_graph_that_gives_other_numbers_is_refused_with_what_differs(monkeypatch):
    import fxpipe.compiler as compiler
    from fxpipe.trace import trace

    def wrong(model, args, kwargs, **options):
        traced = trace(model, args, kwargs, **options)
        for node in traced.module.graph.nodes:
            if node.target is torch.tanh:
                node.target = torch.sigmoid
        traced.module.recompile()
        return traced

    monkeypatch.setattr(compiler, "trace", wrong)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.forward = lambda x: model[1](torch.tanh(model[0](x)))
    x = torch.randn(4, 4)
    with pytest.raises(TraceError, match="other numbers") as caught:
        compile_(model, x)
    assert "output leaf 0" in caught.value.at
    compile_(model, x, verify=False)


def test_the_check_leaves_model_and_random_numbers_as_they_were():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    compile_(model, torch.randn(4, 4, generator=torch.Generator().manual_seed(0)), verify=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_model_that_gives_other_numbers_each_time_is_not_checked(caplog):
    class Restless(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.b(self.a(x) + torch.empty(4).fill_(id(object()) % 1000 + 1))

    runs = iter(range(100))
    model = Restless()
    model.a.register_forward_hook(lambda m, i, o: o + next(runs))
    with caplog.at_level(logging.INFO, "fxpipe.self_check"):
        compile_(model, torch.randn(4, 4), leaf_modules=["a"])
    assert "not checked" in caplog.text


def test_large_models_and_models_without_values_are_not_checked_by_default():
    with torch.device("meta"):
        assert not is_small(nn.Linear(2, 2))
        assert not is_small(nn.Linear(10_000, 10_000))
    assert is_small(nn.Linear(2, 2))

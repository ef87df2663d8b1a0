"""A pipeline gives the numbers of the plain model over the same microbatches, bit for bit."""

import copy

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import fxpipe
from fxpipe.runtime.driver import LocalDriver
from tests import plain
from tests.graphs import places_to_cut
from tests.plain import assert_same
from tests.random_models import RandomModel, batch, loss, recipes, target

laws = settings(max_examples=60, deadline=None)


def pipeline(model, stages, *, rendezvous=False, **options):
    pipe = fxpipe.compile(model, stages, verify=False, **options)
    if rendezvous:
        pipe._driver = LocalDriver(stages, torch.device("cpu"), rendezvous=True)
    return pipe


@laws
@given(st.data())
def test_a_random_model_cut_anywhere(data):
    model = RandomModel(data.draw(recipes(12)))
    count = data.draw(st.integers(1, 4), "microbatches")
    rows = data.draw(st.integers(2 * count, 2 * count + 3), "rows")
    x, y = batch(rows), target(rows)
    places = places_to_cut(model, *(t.tensor_split(count)[0] for t in x))
    wanted = min(data.draw(st.integers(1, 4)), len(places))
    chosen = set(data.draw(st.permutations(places))[:wanted])
    reference = copy.deepcopy(model)
    pipe = pipeline(
        model,
        wanted + 1,
        loss=loss,
        microbatches=count,
        schedule=data.draw(st.sampled_from(["GPipe", "1F1B"]), "schedule"),
        cuts=[place for place in places if place in chosen],
        rendezvous=data.draw(st.booleans(), "rendezvous"),
    )
    for seed in range(2):  # gradients add up, buffers go on
        torch.manual_seed(seed)
        got = pipe.step(*x, target=y)
        torch.manual_seed(seed)
        assert_same(pipe, reference, got, plain.step(reference, x, y, loss, count))


@laws
@given(recipes(), st.integers(2, 5), st.sampled_from(["mean", "sum"]))
def test_a_random_model_cut_for_balance(recipe, stages, reduction):
    model, x, y = RandomModel(recipe), batch(7), target(7)
    places = places_to_cut(model, *(t.tensor_split(3)[0] for t in x))
    stages = min(stages, len(places) + 1)
    reference = copy.deepcopy(model)
    pipe = pipeline(model, stages, loss=loss, microbatches=3, loss_reduction=reduction)
    torch.manual_seed(3)
    got = pipe.step(*x, target=y)
    torch.manual_seed(3)
    assert_same(pipe, reference, got, plain.step(reference, x, y, loss, 3, reduction))


class Attention(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = self.qkv(x).split(width, dim=2)
        q, k, v = (
            t.view(rows, length, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v)
        )
        p = self.dropout if self.training else 0.0
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        return self.out(y.transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, 2, dropout)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Four blocks; positions are made in the forward, the head is the embedding if it is tied."""

    def __init__(self, vocabulary=17, width=8, dropout=0.0, tied=False):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(6, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids):
        places = torch.arange(ids.size(1), device=ids.device)
        x = self.drop(self.tokens(ids) + self.places(places))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token_loss(output, ids):
    return nn.functional.cross_entropy(output[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def gpt(**options):
    torch.manual_seed(0)
    return GPT(**options), torch.randint(0, 17, (10, 6))


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("rendezvous", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_gpt(schedule, rendezvous, tied):
    model, ids = gpt(tied=tied)
    reference = copy.deepcopy(model)
    pipe = pipeline(
        model,
        4,
        loss=next_token_loss,
        microbatches=4,
        schedule=schedule,
        cuts=["blocks.1", "blocks.2", "blocks.3"],
        rendezvous=rendezvous,
    )
    got = pipe.step(ids, target=ids)
    assert_same(pipe, reference, got, plain.step(reference, (ids,), ids, next_token_loss, 4))


def test_dropout_on_several_stages_of_one_process_draws_the_same_numbers():
    model, ids = gpt(dropout=0.3)
    reference = copy.deepcopy(model)
    pipe = pipeline(model, 4, loss=next_token_loss, microbatches=4, schedule="1F1B")
    torch.manual_seed(5)
    got = pipe.step(ids, target=ids)
    torch.manual_seed(5)
    assert_same(pipe, reference, got, plain.step(reference, (ids,), ids, next_token_loss, 4))


def test_evaluation_before_and_after_training_and_in_between():
    model, ids = gpt(dropout=0.3)
    reference = copy.deepcopy(model)
    pipe = pipeline(model, 3, loss=next_token_loss, microbatches=5)
    for _ in range(2):
        pipe.eval()
        reference.eval()
        want = plain.step(reference, (ids,), ids, next_token_loss, 5)
        assert_same(pipe, reference, pipe.step(ids, target=ids), want)
        assert torch.equal(pipe(ids), want.output)
        pipe.train()
        reference.train()
        torch.manual_seed(1)
        got = pipe.step(ids, target=ids)
        torch.manual_seed(1)
        assert_same(pipe, reference, got, plain.step(reference, (ids,), ids, next_token_loss, 5))
    assert model.training  # the model that was handed in kept its mode


def test_gradients_add_up_over_steps_until_they_are_cleared():
    model, ids = gpt(tied=True)
    reference = copy.deepcopy(model)
    pipe = pipeline(model, 4, loss=next_token_loss, microbatches=5)
    for _ in range(3):
        got = pipe.step(ids, target=ids)
        assert_same(pipe, reference, got, plain.step(reference, (ids,), ids, next_token_loss, 5))
    pipe.zero_grad()
    reference.zero_grad()
    got = pipe.step(ids, target=ids)
    assert_same(pipe, reference, got, plain.step(reference, (ids,), ids, next_token_loss, 5))


def test_an_optimizer_trains_pipeline_and_plain_model_alike():
    model, ids = gpt(tied=True)
    reference = copy.deepcopy(model)
    pipe = pipeline(model, 4, loss=next_token_loss, microbatches=5)
    optimizers = []
    for _ in range(3):
        got = pipe.step(ids, target=ids)
        want = plain.step(reference, (ids,), ids, next_token_loss, 5)
        assert_same(pipe, reference, got, want)
        if not optimizers:
            optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (pipe, reference)]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_a_large_tied_embedding_is_equal_up_to_rounding():
    torch.manual_seed(0)
    model = GPT(vocabulary=2**17, tied=True).double()  # 8 MiB: its gradient travels once a step
    ids = torch.randint(0, 2**17, (4, 3))
    reference = copy.deepcopy(model)
    pipe = pipeline(model, 4, loss=next_token_loss, microbatches=2)
    pipe.step(ids, target=ids)
    plain.step(reference, (ids,), ids, next_token_loss, 2)
    for name, parameter in pipe.named_parameters():
        want = reference.get_parameter(name).grad
        if name == "tokens.weight":
            assert torch.allclose(parameter.grad, want, rtol=1e-12, atol=1e-12)
        else:
            assert torch.equal(parameter.grad, want), name


class Dense(nn.Module):
    """Each layer reads what all layers before it made, so gradients come from many stages."""

    def __init__(self, layers=6, width=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width * (i + 1), width) for i in range(layers))

    def forward(self, x):
        found = [x]
        for layer in self.layers:
            found.append(torch.tanh(layer(torch.cat(found, dim=1))))
        return sum(found)


@pytest.mark.parametrize("stages", [2, 3, 6])
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_values_that_many_stages_read(stages, schedule):
    torch.manual_seed(0)
    model, x, y = Dense(), torch.randn(9, 4), torch.randn(9, 4)
    reference = copy.deepcopy(model)
    mse = nn.functional.mse_loss
    pipe = pipeline(model, stages, loss=mse, microbatches=4, schedule=schedule)
    got = pipe.step(x, target=y)
    assert_same(pipe, reference, got, plain.step(reference, (x,), y, mse, 4))


def test_a_resnet_with_its_statistics():
    """Six seconds: batch norm, residuals and in-place activations of a real model."""
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    model = models.resnet18(num_classes=5)
    x, y = torch.randn(7, 3, 32, 32), torch.randint(0, 5, (7,))
    reference = copy.deepcopy(model)
    loss = nn.functional.cross_entropy
    pipe = pipeline(model, 3, loss=loss, microbatches=3)
    for _ in range(2):
        got = pipe.step(x, target=y)
        assert_same(pipe, reference, got, plain.step(reference, (x,), y, loss, 3))
    pipe.eval()
    reference.eval()
    got = pipe.step(x, target=y)
    assert_same(pipe, reference, got, plain.step(reference, (x,), y, loss, 3))


def test_a_model_that_computes_its_own_loss_under_a_sum():
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x, y):
            found = self.b(torch.tanh(self.a(x)))
            return {"loss": (found - y).square().sum(), "found": found}

    torch.manual_seed(0)
    model, x, y = WithLoss(), torch.randn(5, 4), torch.randn(5, 1)
    reference = copy.deepcopy(model)
    pipe = pipeline(model, 2, microbatches=2, loss_reduction="sum")
    got = pipe.step(x, y)
    total = 0.0
    for a, b in zip(x.tensor_split(2), y.tensor_split(2), strict=True):
        value = reference(a, b)["loss"]
        value.backward()
        total = total + value.detach()
    assert torch.equal(got.loss, total)
    for name, parameter in pipe.named_parameters():
        assert torch.equal(parameter.grad, reference.get_parameter(name).grad), name


def test_rows_along_another_dimension():
    class TimeFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = nn.GRU(4, 4), nn.Linear(4, 2)

        def forward(self, x, scale):
            hidden, last = self.rnn(x)
            return self.out(hidden[-1] + last[0]) * scale

    torch.manual_seed(0)
    model, x, scale, y = TimeFirst(), torch.randn(3, 8, 4), torch.rand(2), torch.randn(8, 2)
    reference = copy.deepcopy(model)
    mse = nn.functional.mse_loss
    pipe = pipeline(
        model, 2, loss=mse, microbatches=4, batch_dims={"x": 1, "scale": None}, cuts=["out"]
    )
    got = pipe.step(x, scale, target=y)
    fixed = nn.Module()
    fixed.forward = lambda x: reference(x, scale)
    want = plain.step(fixed, (x,), y, mse, 4, rows_dim=1)
    assert torch.equal(got.loss, want.loss)
    assert torch.equal(got.output, want.output)
    for name, parameter in pipe.named_parameters():
        assert torch.equal(parameter.grad, reference.get_parameter(name).grad), name


def test_the_shape_of_batches_may_change_from_step_to_step():
    model, _ = gpt()
    reference = copy.deepcopy(model)
    pipe = pipeline(model, 4, loss=next_token_loss, microbatches=3)
    for rows, length in ((6, 6), (7, 4), (3, 2), (6, 6)):
        ids = torch.randint(0, 17, (rows, length))
        got = pipe.step(ids, target=ids)
        assert_same(pipe, reference, got, plain.step(reference, (ids,), ids, next_token_loss, 3))

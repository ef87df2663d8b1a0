"""Whole pipelines over real processes: the same numbers, one state, and one error for all."""

import copy
import os
import signal
import time

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import Phase, assume, given, settings
from torch import nn

import fxpipe
from fxpipe.errors import FxpipeError, OptionError, RankError
from tests import plain, random_models
from tests.graphs import places_to_cut
from tests.random_models import RandomModel, recipes, target
from tests.ranks import run_ranks

mse = nn.functional.mse_loss


class Net(nn.Module):
    """Eight layers with a skip edge, a batch norm, and a weight that the first and last share."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.scale, self.unread = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(2))

    def forward(self, x):
        x = self.embed(x)
        first = x
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) * self.scale
            if i == 1:
                x = self.norm(x)
        x = (x + first) * (first > 0)
        return x @ self.head.weight


CUTS = {2: ["layers.3"], 4: ["layers.1", "layers.3", "layers.4"]}


def made(ranks, **options):
    torch.manual_seed(0)
    model = Net().double()
    example = ((data()[0],), {})
    defaults = {"loss": mse, "microbatches": 4, "cuts": CUTS[ranks], "example_inputs": example}
    return model, fxpipe.compile(model, ranks, **{**defaults, **options})


def data(rows=9):
    generator = torch.Generator().manual_seed(rows)
    x, y = (torch.randn(rows, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


def reference(steps=1):
    """The plain model after some steps, and the results of these."""
    torch.manual_seed(0)
    model, (x, y) = Net().double(), data()
    return model, [plain.step(model, (x,), y, mse, 4) for _ in range(steps)]


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_give_the_bits_of_the_plain_model(ranks, schedule):
    model, results = reference(steps=2)
    gradients = {n: p.grad for n, p in model.named_parameters()}
    buffers = dict(model.named_buffers())

    def rank(number):
        _, pipe = made(ranks, schedule=schedule)
        x, y = data()
        for want in results:
            got = pipe.step(x, target=y)
            assert torch.equal(got.loss, want.loss)
            if number == ranks - 1:
                assert torch.equal(got.output, want.output)
            else:
                assert got.output is None
        held = {n: p.grad for n, p in pipe.named_parameters()}
        plain.assert_equal("gradient", held, {n: gradients[n] for n in held})
        here = dict(pipe.named_buffers())
        plain.assert_equal("buffer", here, {n: buffers[n] for n in here})
        return list(held), list(here)

    found = run_ranks(ranks, rank)
    assert {n for held, _ in found for n in held} == set(gradients)
    assert {n for _, here in found for n in here} == set(buffers)
    # the tied weight is everywhere where it is read, under its first name
    assert [("embed.weight" in held) for held, _ in found].count(True) == 2


@settings(max_examples=12, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.data())
def test_a_random_model_gives_the_same_bits_on_ranks_that_share_nothing(data):
    """Half a second an example, so that there are few, and a failing one is not made smaller."""
    model, x, y = RandomModel(data.draw(recipes())), random_models.batch(9), target(9)
    places = places_to_cut(model, *(t.tensor_split(4)[0] for t in x))
    wanted = min(data.draw(st.integers(1, 3)), len(places))
    chosen = set(data.draw(st.permutations(places))[:wanted])
    cuts = [place for place in places if place in chosen]
    draws = any(step.op == "dropout" for step in model.recipe.steps)
    assume(wanted and not draws)  # every rank draws random numbers of its own
    trained = copy.deepcopy(model)
    wants = [plain.step(trained, x, y, random_models.loss, 4) for _ in range(2)]
    gradients = {n: p.grad for n, p in trained.named_parameters()}
    buffers = dict(trained.named_buffers())

    def rank(number):
        options = {"loss": random_models.loss, "microbatches": 4, "cuts": cuts, "verify": False}
        pipe = fxpipe.compile(model, wanted + 1, **options)
        for want in wants:
            assert torch.equal(pipe.step(*x, target=y).loss, want.loss)
        for name, parameter in pipe.named_parameters():
            if gradients[name] is None:  # a tied one may have zeros where no rank has a gradient
                assert parameter.grad is None or not parameter.grad.any()
            else:
                assert torch.equal(parameter.grad, gradients[name]), name
        for name, buffer in pipe.named_buffers():
            assert torch.equal(buffer, buffers[name]), name

    run_ranks(wanted + 1, rank)


def test_outputs_reach_every_rank_that_asks():
    _, (want,) = reference()

    def rank(number):
        _, pipe = made(4, outputs="all")
        x, y = data()
        assert torch.equal(pipe.step(x, target=y).output, want.output)

    run_ranks(4, rank)


def test_evaluation_before_and_after_training():
    model, _ = reference(steps=0)
    x, y = data()
    before = model.eval()(x)
    plain.step(model.train(), (x,), y, mse, 4)
    after = plain.step(model.eval(), (x,), y, mse, 4)

    def rank(number):
        _, pipe = made(4)
        x, y = data()
        for want, train in ((before, True), (after.output, False)):
            out = pipe.eval()(x)
            if number == 3:
                # the plain model took the whole batch at once
                assert torch.allclose(out, want, rtol=1e-12, atol=1e-12)
            if train:
                pipe.train().step(x, target=y)
        assert torch.equal(pipe.step(x, target=y).loss, after.loss)

    run_ranks(4, rank)


def test_an_optimizer_of_each_rank_trains_the_whole_model():
    model, _ = reference(steps=0)
    x, y = data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        plain.step(model, (x,), y, mse, 4)
        optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict()

    def rank(number):
        _, pipe = made(4)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
        for _ in range(3):
            pipe.step(*data()[:1], target=data()[1])
            optimizer.step()
            pipe.zero_grad()
        found = pipe.full_state_dict()
        assert list(found) == list(state)
        assert all(torch.equal(found[k], state[k]) for k in state)

    run_ranks(4, rank)


def test_each_rank_saves_its_part_and_loads_it_from_the_whole():
    def rank(number):
        model, pipe = made(4)
        own, want = pipe.state_dict(), model.state_dict()
        assert set(own) < set(want)
        assert [k for k in want if k in own] == list(own)
        whole = pipe.full_state_dict()
        assert list(whole) == list(want)
        assert all(torch.equal(whole[k], want[k]) for k in want)
        pipe.load_state_dict({k: torch.full_like(v, 3) for k, v in whole.items()})
        assert all((v == 3).all() for v in pipe.full_state_dict().values())
        pipe.load_state_dict({k: torch.full_like(v, 4) for k, v in own.items()})
        assert all((v == 4).all() for v in pipe.state_dict().values())
        with pytest.raises(FxpipeError, match="lacks 1 entries"):
            pipe.load_state_dict(dict(list(own.items())[1:]))
        return list(own)

    parts = run_ranks(4, rank)
    # what no stage reads is kept by the first
    assert [("unread" in part) for part in parts] == [True, False, False, False]
    assert [("embed.weight" in part, "head.weight" in part) for part in parts] == [
        (True, True),
        (False, False),
        (False, False),
        (True, True),
    ]


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_the_norm_counts_every_parameter_once(norm_type):
    model, _ = reference()
    want = nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type)
    gradients = {n: p.grad for n, p in model.named_parameters()}

    def rank(number):
        _, pipe = made(4)
        pipe.step(*data()[:1], target=data()[1])
        norm = pipe.clip_grad_norm_(0.01, norm_type)
        assert torch.allclose(norm, want, rtol=1e-12)
        for name, parameter in pipe.named_parameters():
            if parameter.grad is not None:
                assert torch.allclose(parameter.grad, gradients[name], rtol=1e-12), name

    run_ranks(4, rank)


class Failing(nn.Module):
    """Raises on one row of the batch, in the forward or in the backward."""

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("no way back")

    def __init__(self, backward):
        super().__init__()
        self.backward = backward

    def forward(self, x, ids):
        if self.backward:
            return self.Backward.apply(x)
        return x + nn.functional.one_hot(ids, 6)


class Fragile(nn.Module):
    def __init__(self, backward):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.failing, self.d = Failing(backward), nn.Linear(6, 6)

    def forward(self, x, ids):
        return self.c(self.failing(self.d(self.b(self.a(x))), ids))


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_an_error_of_one_rank_ends_all_with_its_place(backward):
    x, y = data(8)
    ids = torch.zeros(8, dtype=torch.int64)
    if not backward:
        ids[5] = 9  # in the third of four microbatches

    def rank(number):
        torch.manual_seed(0)
        model = Fragile(backward).double()
        cuts = ["b", "failing", "c"]
        pipe = fxpipe.compile(model, 4, loss=mse, microbatches=4, cuts=cuts, verify=False)
        start = time.monotonic()
        with pytest.raises(RankError) as caught:
            pipe.step(x, ids, target=y)
        assert time.monotonic() - start < 10
        return caught.value.problem, caught.value.at

    found = run_ranks(4, rank)
    assert len({problem for problem, _ in found}) == 1
    problem, at = found[0]
    assert problem.startswith("rank 2: ")
    assert ("no way back" if backward else "Class values must be smaller") in problem
    wanted = ["stage 2", "backward" if backward else "forward"]
    if not backward:
        wanted += ["2F2", "microbatch 2", "module failing (Failing)", "test_pipeline_ranks.py"]
    for part in wanted:
        assert part in at


def test_a_killed_rank_is_named_by_all_others():
    x, y = data(8)
    doomed = []

    class Suicidal(nn.Module):
        def forward(self, x):
            if doomed:
                os.kill(os.getpid(), signal.SIGKILL)
            return x

    def rank(number):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 4), nn.Linear(4, 4), Suicidal(), nn.Linear(4, 4)
        ).double()
        pipe = fxpipe.compile(
            model, 2, loss=mse, microbatches=4, cuts=["2"], leaf_modules=["2"], verify=False
        )
        pipe.step(x, target=y)
        doomed.extend([number] * (number == 1))
        with pytest.raises(RankError, match="rank 1: its process is gone"):
            pipe.step(x, target=y)
        raise SystemExit(3)

    run_ranks(2, rank, ends={0: "SystemExit", 1: -9})


def test_ranks_that_compiled_different_plans_are_told_before_the_first_step():
    def rank(number):
        cuts = ["layers.2"] if number == 1 else ["layers.3"]
        _, pipe = made(2, cuts=cuts)
        with pytest.raises(
            RankError, match="rank 0 and ranks 1 compiled different plans"
        ) as caught:
            pipe.step(*data()[:1], target=data()[1])
        assert "the same model, options and batch" in caught.value.hint

    run_ranks(2, rank)


def test_ranks_whose_first_batch_has_other_rows_are_told():
    def rank(number):
        _, pipe = made(2, example_inputs=None)
        x, y = data(9 if number else 16)
        with pytest.raises(RankError, match="rank 0 and ranks 1 compiled different plans"):
            pipe.step(x, target=y)

    run_ranks(2, rank)


def test_a_world_of_another_size_is_refused():
    def rank(number):
        with pytest.raises(
            OptionError, match="has 4 ranks, but the world has 2 processes"
        ) as caught:
            made(4)
        assert "use stages = 2 * chunks, or start 4 processes" in caught.value.hint

    run_ranks(2, rank)


def test_two_pipelines_share_the_processes():
    _, (want,) = reference()

    def rank(number):
        pipes = [made(2, schedule=schedule)[1] for schedule in ("GPipe", "1F1B")]
        x, y = data()
        for pipe in (*pipes, *pipes):
            # batch norm in train mode: its statistics change, and not the loss
            assert torch.equal(pipe.step(x, target=y).loss, want.loss)

    run_ranks(2, rank)


def test_a_local_pipeline_runs_inside_of_a_rank():
    model, (want,) = reference()

    def rank(number):
        _, pipe = made(4, transport="local")
        x, y = data()
        assert torch.equal(pipe.step(x, target=y).loss, want.loss)
        held = {n: p.grad for n, p in pipe.named_parameters()}
        plain.assert_equal("gradient", held, {n: p.grad for n, p in model.named_parameters()})

    run_ranks(2, rank)

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.verification import Row, Verification, _compare_gradients, _difference, _explain
from tests.ranks import run_ranks


class Layer(nn.Module):
    """Counts the rows it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("rows", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.rows += x.size(0)
        return torch.tanh(self.linear(x))


def make_model(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer(), Layer(), Layer(), *more).double()


def make_batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(rows, 6).double(), torch.randn(rows, 6).double()


def check(model: nn.Module, *, rows: int = 8, stages: int = 2, **options: Any) -> Verification:
    x, y = make_batch(rows)
    options = {"loss": F.mse_loss, "microbatches": 4, **options}
    return fxpipe.verify(model, (x,), target=y, stages=stages, **options)


def kinds_that_differ(verification: Verification) -> set[str]:
    return {row.kind for row in verification.rows if not row.equal}


def test_every_output_loss_gradient_and_buffer_has_a_row_and_is_equal():
    model = make_model()
    verification = check(model)
    assert verification.ok
    assert [(row.kind, row.name) for row in verification.rows] == [
        ("output", "output"),
        ("loss", "loss"),
        *(("gradient", name) for name, _ in model.named_parameters()),
        *(("buffer", name) for name, _ in model.named_buffers()),
    ]


def test_the_table_ends_with_the_number_of_equal_rows():
    text = str(check(make_model()))
    assert text.endswith("\n14 of 14 equal bit for bit")
    assert "0.linear.weight  f64[6, 6]  equal" in text


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_unequal_microbatches_weigh_the_same_in_both_runs(reduction: str):
    assert check(make_model(), rows=10, loss_reduction=reduction).ok


def test_schedule_and_cuts_reach_the_compiler():
    assert check(make_model(), schedule="GPipe", cuts=["3"]).ok
    with pytest.raises(fxpipe.FxpipeError, match="no schedule is named 'none'"):
        check(make_model(), schedule="none")


def test_random_numbers_are_the_same_in_both_runs():
    assert check(make_model(nn.Dropout(0.5))).ok


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()

    def forward(self, x: Tensor, mask: Tensor, *, name: str = "a") -> dict[str, Any]:
        y = self.layers(x) * mask
        return {"y": y, "mean": y.mean(), "name": name, "none": None}


def test_inputs_that_are_not_cut_and_outputs_of_any_structure_are_compared():
    x, y = make_batch()
    verification = fxpipe.verify(
        Scored(),
        (x,),
        {"mask": torch.ones(6).double(), "name": "b"},
        y,
        stages=2,
        loss=lambda output, target: F.mse_loss(output["y"], target) + output["mean"],
        batch_dims={"mask": None},
    )
    assert verification.ok
    assert [row.name for row in verification.rows if row.kind == "output"] == [
        "output['y']",
        "output['mean']",
        "output['name']",
        "output['none']",
    ]


class OwnLoss(nn.Module):
    """Computes its loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.calls = make_model(), 0

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()

    def twice(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return 2 * output


def test_a_model_may_compute_its_own_loss():
    verification = fxpipe.verify(OwnLoss(), (make_batch()[0],), stages=2)
    assert verification.ok
    assert {row.kind for row in verification.rows} == {"output", "loss", "gradient", "buffer"}


class TakesTarget(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"loss": F.mse_loss(self.layers(x), target)}


def test_a_model_may_take_the_target():
    x, y = make_batch()
    assert fxpipe.verify(TakesTarget(), (x,), target=y, stages=2).ok
    assert fxpipe.verify(TakesTarget(), (x,), {"target": y}, stages=2).ok
    assert fxpipe.verify(TakesTarget().eval(), (x,), target=y, stages=2).ok


def test_a_model_without_values_is_refused():
    with pytest.raises(fxpipe.FxpipeError, match="no values to run plain"):
        check(make_model().to("meta"))


def test_in_eval_mode_there_are_no_gradients_and_without_a_loss_no_loss():
    model = make_model().eval()
    assert {row.kind for row in check(model).rows} == {"output", "loss", "buffer"}
    forward = fxpipe.verify(model, (make_batch()[0],), stages=2)
    assert {row.kind for row in forward.rows} == {"output", "buffer"}
    assert forward.ok


def counted(function: Callable[[int], float]) -> Iterator[float]:
    """Gives another number each time: the trace, or the first run, sees the first ones."""
    return map(function, itertools.count(1))


class Drifts(nn.Module):
    """Multiplies by a number that changes from call to call; a trace keeps the first."""

    def __init__(self, numbers: Iterator[float]) -> None:
        super().__init__()
        self.numbers = [numbers]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Drifts":
        return self

    def forward(self, x: Tensor) -> Tensor:
        return x * next(self.numbers[0])


def test_a_different_output_is_found():
    assert "output" in kinds_that_differ(check(make_model(Drifts(counted(float)))))


def test_a_different_loss_is_found():
    numbers = counted(float)
    found = check(make_model(), loss=lambda y, t: F.mse_loss(y, t) + next(numbers))
    assert kinds_that_differ(found) == {"loss"}


def test_a_different_gradient_is_found():
    numbers = counted(float)

    def loss(y: Tensor, t: Tensor) -> Tensor:
        total = y.sum()
        return F.mse_loss(y, t) + next(numbers) * (total - total.detach())

    assert kinds_that_differ(check(make_model(), loss=loss)) == {"gradient"}


class CountsTooMuch(nn.Module):
    def __init__(self, numbers: Iterator[float]) -> None:
        super().__init__()
        self.drifts = Drifts(numbers)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += self.drifts(torch.ones(1))
        return x


def test_a_different_buffer_is_found():
    found = check(make_model(CountsTooMuch(counted(float))))
    assert [(r.kind, r.name) for r in found.rows if not r.equal] == [("buffer", "4.seen")]


class Renames(nn.Module):
    def __init__(self, numbers: Iterator[float]) -> None:
        super().__init__()
        self.drifts = Drifts(numbers)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {f"y{next(self.drifts.numbers[0]):.0f}": x}


def test_another_structure_of_the_output_is_found():
    found = check(make_model(Renames(counted(float))), loss=lambda y, t: F.mse_loss(*y.values(), t))
    (row,) = (row for row in found.rows if not row.equal)
    assert (row.kind, row.difference) == ("output", math.inf)
    assert row.note.startswith("{'y1': *}, plain: {'y")


def test_the_largest_difference_is_named_and_a_tolerance_accepts_it():
    tiny = counted(lambda n: 1e-9 * n)
    found = check(make_model(), loss=lambda y, t: F.mse_loss(y, t) + next(tiny))
    assert not found.ok
    assert found.within(1e-6)
    assert not found.within(1e-12)
    assert "13 of 14 equal bit for bit, largest difference 4e-09 in loss loss" in str(found)


@pytest.mark.parametrize(
    ("gradient", "plain", "equal", "note"),
    [
        (None, None, True, "None"),
        (None, torch.zeros(2), True, "None, plain: zeros"),
        (torch.zeros(2), None, True, "zeros, plain: None"),
        (torch.ones(2), None, False, "a tensor, plain: None"),
        (torch.ones(2), torch.ones(3), False, "f32[2], plain: f32[3]"),
        (torch.ones(2), torch.ones(2).double(), False, "f32[2], plain: f64[2]"),
        (torch.ones(2).to_sparse(), torch.ones(2), True, ""),
    ],
)
def test_a_gradient_that_is_none_equals_zeros_and_the_note_says_so(gradient, plain, equal, note):
    row = _compare_gradients("w", gradient, plain)
    assert (row.equal, row.note) == (equal, note)


@pytest.mark.parametrize(
    ("value", "plain", "difference", "note"),
    [
        ([1.0, math.nan], [1.0, math.nan], 0.0, "nan in the same places"),
        ([math.nan, 1.0], [1.0, math.nan], math.inf, "2 of 2 differ"),
        ([math.inf, 1.0], [math.inf, 1.5], 0.5, "1 of 2 differ"),
        ([math.inf], [-math.inf], math.inf, "1 of 1 differ"),
        ([2**60 + 1], [2**60], 1.0, "1 of 1 differ"),
        ([True, False], [True, True], 1.0, "1 of 2 differ"),
        ([1 + 1j], [1 + 2j], 1.0, "1 of 1 differ"),
    ],
)
def test_differences_are_exact_for_nan_infinity_and_large_integers(value, plain, difference, note):
    equal, found, said = _difference(torch.tensor(value), torch.tensor(plain))
    assert (equal, found, said) == (difference == 0.0, difference, note)


def test_the_note_of_a_tied_gradient_that_differs_names_its_stages():
    row = Row("gradient", "head.weight", "f32[2]", False, 1e-9, "1 of 2 differ")
    assert _explain(row, {"head.weight": (0, 3)}).note == "tied over stages 0, 3; 1 of 2 differ"
    assert _explain(row, {"other": (0, 3)}) == row


def test_a_remark_is_printed_only_where_something_differs():
    equal, differ = Row("loss", "loss", "", True, 0.0), Row("loss", "loss", "", False, 1.0)
    assert not str(Verification((equal,), "because")).endswith("because")
    assert str(Verification((differ,), "because")).endswith("in loss loss\nbecause")


def test_the_model_the_batch_and_the_random_numbers_stay_as_they_were():
    model = make_model(nn.Dropout(0.5), nn.ReLU(inplace=True))
    model[1].eval()
    x, y = make_batch()
    model(x).sum().backward()
    before, batch = copy.deepcopy(model), (x.clone(), y.clone())
    gradients = [p.grad.clone() for p in model.parameters()]
    state = torch.get_rng_state()
    fxpipe.verify(model, (x,), target=y, stages=2, loss=F.mse_loss)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, batch[0])
    assert torch.equal(y, batch[1])
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert [m.training for m in model.modules()] == [m.training for m in before.modules()]
    for name, value in before.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


class WritesItsInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


def test_a_model_that_writes_its_input_writes_a_copy():
    x, y = make_batch()
    before = x.clone()
    model = nn.Sequential(WritesItsInput(), *make_model()).eval()
    assert fxpipe.verify(model, (x,), target=y, stages=2, loss=F.mse_loss).ok
    assert torch.equal(x, before)


class Weighed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6).double())

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output * self.weight, target)


def test_a_loss_that_trains_keeps_no_gradient():
    loss = Weighed()
    assert check(make_model(), loss=loss).ok
    assert loss.weight.grad is None


def test_a_loss_that_is_a_method_of_the_model_is_that_of_the_copy():
    model = OwnLoss()
    assert fxpipe.verify(model, (make_batch()[0],), stages=2, loss=model.twice).ok
    assert model.calls == 0


def test_every_rank_returns_the_whole_comparison():
    first, second = run_ranks(2, lambda _: check(make_model()))
    assert first == second
    assert first.ok
    assert str(first).endswith("14 of 14 equal bit for bit")


def test_a_difference_on_one_rank_is_found_by_every_rank():
    def run(rank: int) -> Verification:
        return check(make_model(CountsTooMuch(counted(float))))

    for found in run_ranks(2, run):
        assert [(r.kind, r.name) for r in found.rows if not r.equal] == [("buffer", "4.seen")]


def test_random_numbers_of_ranks_are_remarked():
    found = run_ranks(
        2, lambda _: check(nn.Sequential(nn.Dropout(0.5), *make_model(nn.Dropout(0.5))))
    )
    assert found[0] == found[1]
    assert "each rank its own" in str(found[0])


def test_ranks_that_run_within_one_process_do_not_wait_for_others():
    def run(rank: int) -> bool:
        return check(make_model(), transport="local").ok if rank == 0 else True

    assert run_ranks(2, run) == [True, True]

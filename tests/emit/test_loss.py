"""The loss is traced into the last script, or refused by name."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.errors import FxpipeError
from fxpipe.runtime import script
from tests.emit.models import Mlp

X = torch.linspace(-1, 1, 28).view(7, 4)
LABELS = torch.arange(7) % 3


def make(loss, **options):
    torch.manual_seed(0)
    return fxpipe.compile(Mlp(), 2, loss=loss, microbatches=3, **options)


def losses(loss, target, folder):
    """Of the pipeline, and of its scripts."""
    pipe = make(loss)
    pipe.emit(folder, args=(X,), target=target)
    with script.load(folder, 2) as scripts:
        return pipe.step(X, target=target).loss, scripts.step(X, target=target).loss


def test_a_closure_is_traced(tmp_path):
    weight = torch.tensor([1.0, 2.0, 3.0])
    smoothing = 0.1

    def loss(output, target):
        return F.cross_entropy(output, target, weight, label_smoothing=smoothing)

    expected, found = losses(loss, LABELS, tmp_path)
    assert torch.equal(found, expected)


def test_a_module_with_buffers_is_traced_and_saved(tmp_path):
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    expected, found = losses(loss, LABELS, tmp_path)
    assert torch.equal(found, expected)
    assert torch.load(tmp_path / "rank_0.pt", weights_only=False)["loss"] is None


def test_a_loss_may_take_no_target(tmp_path):
    expected, found = losses(lambda output, target: output.square().mean(), None, tmp_path)
    assert torch.equal(found, expected)


def test_without_a_loss_the_output_is_it(tmp_path):
    class Squared(Mlp):
        def forward(self, x):
            return super().forward(x).square().mean()

    pipe = fxpipe.compile(Squared(), 2, microbatches=3)
    pipe.emit(tmp_path, args=(X,))
    with script.load(tmp_path, 2) as scripts:
        assert torch.equal(scripts.step(X).loss, pipe.step(X).loss)


def test_a_loss_that_branches_on_data_is_refused_with_its_line(tmp_path):
    def loss(output, target):
        value = F.cross_entropy(output, target)
        return value if value > 1 else value * 0

    with pytest.raises(FxpipeError, match="the loss cannot be written into a script: ") as raised:
        make(loss).emit(tmp_path, args=(X,), target=LABELS)
    assert "return value if value > 1 else value * 0" in raised.value.at
    assert not list(tmp_path.glob("rank_1*"))


def test_a_loss_that_is_no_scalar_is_refused(tmp_path):
    with pytest.raises(FxpipeError, match=re.escape("it is [3, 3], not a 0-dim tensor")):
        make(lambda output, target: output).emit(tmp_path, args=(X,), target=LABELS)


def test_a_loss_that_is_other_code_for_other_rows_is_refused(tmp_path):
    def loss(output, target):
        return output.sum() if output.shape[0] == 3 else output.mean()

    with pytest.raises(FxpipeError, match="other code for each number of rows") as raised:
        make(loss).emit(tmp_path, args=(X,), target=LABELS)
    assert "[[[3, 4]], [[2, 4]]]" in raised.value.at


def test_without_a_target_a_loss_of_a_module_is_imported():
    code = make(F.cross_entropy, example_inputs=((X,), {})).code(1)
    assert "from torch.nn.functional import cross_entropy as loss_cross_entropy" in code
    assert "    return (loss_cross_entropy(output, target),)" in code


def test_an_imported_loss_gives_the_same_numbers(tmp_path):
    for name, loss in {"function": F.cross_entropy, "module": nn.CrossEntropyLoss()}.items():
        pipe = make(loss, example_inputs=((X[:6],), {}))
        pipe.emit(tmp_path / name)
        with script.load(tmp_path / name, 2) as scripts:
            found = scripts.step(X[:6], target=LABELS[:6]).loss
        assert torch.equal(found, pipe.step(X[:6], target=LABELS[:6]).loss)


def test_without_a_target_a_loss_that_cannot_be_imported_is_refused():
    pipe = make(lambda output, target: F.cross_entropy(output, target), example_inputs=((X,), {}))
    with pytest.raises(FxpipeError, match=r"can only be imported, and .*<lambda>") as raised:
        pipe.code(1)
    assert "target=" in raised.value.hint
    pipe.code(0)  # the other ranks need no loss

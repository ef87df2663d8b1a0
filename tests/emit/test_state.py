"""What lies beside a script is the model's state under its own names."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.emit.state import save_state
from fxpipe.errors import FxpipeError
from tests.emit.models import Mlp, Tied


def test_a_file_holds_the_modules_of_its_rank_under_their_names(tmp_path):
    model = Mlp()
    inputs = (torch.zeros(6, 4),), {}
    pipe = fxpipe.compile(model, 2, loss=F.cross_entropy, cuts=["narrow"], example_inputs=inputs)
    pipe.emit(tmp_path)
    (stage,) = torch.load(tmp_path / "rank_1.pt", weights_only=False)["stages"].values()
    assert type(stage) is nn.Module
    assert type(stage.narrow) is nn.Linear
    found = dict(stage.named_parameters())
    assert found.keys() == {"narrow.weight", "narrow.bias"}
    assert torch.equal(found["narrow.weight"], model.narrow.weight)


def test_writing_a_tied_model_leaves_the_pipeline_as_it_was(tmp_path):
    model, ids = Tied(), torch.zeros(3, 2, dtype=torch.int64)
    pipe = fxpipe.compile(model, 3, loss=lambda o, t: o.mean(), example_inputs=((ids,), {}))
    before = pipe.step(ids).loss
    pipe.emit(tmp_path)
    assert model.head.weight is model.embed.weight
    assert torch.equal(pipe.step(ids).loss, before)


def test_parameters_without_data_are_refused_by_name(tmp_path):
    with torch.device("meta"):
        stage = nn.Module()
        stage.add_module("inner", nn.Linear(2, 2))
    with pytest.raises(FxpipeError, match=r"inner\.weight has no data to save"):
        save_state(tmp_path / "rank_0.pt", {0: stage}, None)


def test_a_module_of_the_file_that_is_run_is_refused(tmp_path):
    class Leaf(nn.Module):
        pass

    Leaf.__module__ = "__main__"
    stage = nn.Module()
    stage.add_module("inner", Leaf())
    with pytest.raises(FxpipeError, match="Leaf cannot be imported by a script") as raised:
        save_state(tmp_path / "rank_0.pt", {0: stage}, None)
    assert raised.value.at == "rank_0.pt: inner"


def test_a_module_that_cannot_be_pickled_is_refused(tmp_path):
    stage = nn.Module()
    stage.add_module("inner", nn.Linear(2, 2))
    stage.inner.hook = lambda x: x
    with pytest.raises(FxpipeError, match="the modules of rank_0 cannot be saved: "):
        save_state(tmp_path / "rank_0.pt", {0: stage}, None)

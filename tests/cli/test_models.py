from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fxpipe.cli.models import load_model
from fxpipe.errors import FxpipeError

WriteModel = Callable[..., str]


def test_a_file_gives_model_batch_and_options(tiny: str):
    found = load_model(tiny)
    assert type(found.model).__name__ == "Sequential"
    assert found.args[0].shape == (8, 6)
    assert found.kwargs == {}
    assert sorted(found.options) == ["loss", "microbatches", "stages"]


def test_split_is_another_name_for_batch_dims(model_file: WriteModel):
    made = "dict(model=torch.nn.Identity(), args=(), kwargs=None, split={'mask': None}, notes='')"
    found = load_model(model_file(f"import torch\ndef make(): return {made}"))
    assert found.options == {"batch_dims": {"mask": None}}
    assert found.target is None


def test_the_same_seed_gives_the_same_weights(tiny: str):
    first, again, other = (load_model(tiny, seed=seed).model for seed in (1, 1, 2))
    assert torch.equal(first[0][0].weight, again[0][0].weight)
    assert not torch.equal(first[0][0].weight, other[0][0].weight)


def test_a_module_is_found_from_the_current_folder(
    model_file: WriteModel, monkeypatch: pytest.MonkeyPatch
):
    path = Path(model_file(name="models_of_mine.py"))
    monkeypatch.chdir(path.parent)
    assert load_model("models_of_mine").args[0].shape == (8, 6)


def test_a_file_may_import_its_neighbours(model_file: WriteModel):
    model_file(name="neighbour.py")
    assert load_model(model_file("from neighbour import make", "second.py")).args


def test_a_file_with_the_name_of_a_loaded_module_leaves_that_one_alone(model_file: WriteModel):
    assert load_model(model_file(name="torch.py")).args
    import torch as again

    assert again is torch


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("missing.py", "there is no file missing.py"),
        ("no_such.package", "there is no module no_such.package"),
        ("json", "json has no function make()"),
    ],
)
def test_a_spec_that_names_no_model_is_reported(spec: str, problem: str):
    with pytest.raises(FxpipeError) as caught:
        load_model(spec)
    assert caught.value.problem == problem


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        ("3", "make() returns a int"),
        ("{}", "the model is missing, not an nn.Module"),
        ("{'model': print}", "the model is builtin_function_or_method, not an nn.Module"),
    ],
)
def test_what_make_returns_is_checked(model_file: WriteModel, made: str, problem: str):
    with pytest.raises(FxpipeError) as caught:
        load_model(model_file(f"def make(): return {made}"))
    assert caught.value.problem == problem
    assert "make() returns a mapping with model and args" in caught.value.hint


def test_a_module_that_lacks_an_import_of_its_own_says_so(
    model_file: WriteModel, monkeypatch: pytest.MonkeyPatch
):
    path = Path(model_file("import not_installed_anywhere", "lacking.py"))
    monkeypatch.chdir(path.parent)
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        load_model("lacking")

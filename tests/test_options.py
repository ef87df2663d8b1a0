import dataclasses
import inspect

import pytest
import torch

import fxpipe
from fxpipe.errors import OptionError
from fxpipe.options import CompileOptions

WRONG = {
    "no stages": ({"stages": 0}, "stages is 0, not a whole number of at least 1"),
    "half a stage": ({"stages": 1.5}, "stages is 1.5, not a whole number"),
    "a truth value of stages": ({"stages": True}, "stages is True, not a whole number"),
    "no chunks": ({"chunks": 0}, "chunks is 0, not a whole number"),
    "no microbatches": ({"microbatches": 0}, "microbatches is 0, not a whole number"),
    "chunks that do not divide": (
        {"stages": 4, "chunks": 3},
        "4 stages cannot be dealt out 3 a rank",
    ),
    "an unknown engine": ({"engine": "steam"}, "unknown engine 'steam'"),
    "an unknown checkpoint": (
        {"activation_checkpoint": "maybe"},
        "unknown activation_checkpoint 'maybe'",
    ),
    "an unknown transport": ({"transport": "mail"}, "unknown transport 'mail'"),
    "an unknown reduction": ({"loss_reduction": "max"}, "unknown loss_reduction 'max'"),
    "an unknown balance": ({"balance": "hope"}, "unknown balance 'hope'"),
    "unknown outputs": ({"outputs": "some"}, "unknown outputs 'some'"),
    "a loss that is none": ({"loss": "mse"}, "loss is a str, not a function"),
    "too many cuts": ({"cuts": ("a", "b")}, "2 stages need 1 cuts, 2 are given"),
    "too few cuts": ({"stages": 3, "cuts": ("a",)}, "3 stages need 2 cuts, 1 are given"),
}


@pytest.mark.parametrize(("options", "problem"), WRONG.values(), ids=WRONG)
def test_an_option_that_cannot_work_is_named_with_its_value(options, problem):
    with pytest.raises(OptionError) as caught:
        CompileOptions(**{"stages": 2, **options})
    assert problem in caught.value.problem
    name, value = list(options.items())[-1]
    assert f"{name}={value!r}" in caught.value.at


def test_an_unknown_value_is_answered_with_the_known_ones():
    with pytest.raises(OptionError) as caught:
        CompileOptions(2, loss_reduction="max")
    assert caught.value.hint == "known: mean, sum"


def test_the_number_of_stages_that_fits_the_cuts_is_offered():
    with pytest.raises(OptionError) as caught:
        CompileOptions(2, cuts=("a", "b", "c"))
    assert caught.value.hint == "use stages=4"


def test_ranks_and_microbatches_follow_from_the_stages():
    assert CompileOptions(6, chunks=2).ranks == 3
    assert CompileOptions(3).wanted_microbatches == 12
    assert CompileOptions(3, microbatches=5).wanted_microbatches == 5


def test_options_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CompileOptions(2).stages = 3


def test_compile_takes_every_option_with_the_same_default():
    parameters = inspect.signature(fxpipe.compile).parameters
    fields = {f.name: f for f in dataclasses.fields(CompileOptions)}
    assert set(fields) <= set(parameters)
    assert set(parameters) - set(fields) == {"model", "example_inputs", "mesh"}
    for name, field in fields.items():
        default = parameters[name].default
        if field.default is not dataclasses.MISSING and name != "leaf_modules":
            assert default == field.default, name
    named = [p for name, p in parameters.items() if name not in ("model", "stages")]
    assert all(p.kind is p.KEYWORD_ONLY for p in named)


def test_every_option_reaches_the_pipeline():
    given = {
        "loss": torch.nn.functional.mse_loss,
        "microbatches": 3,
        "schedule": "GPipe",
        "cuts": ("1",),
        "balance": "parameters",
        "batch_dims": {"input": 0},
        "loss_reduction": "sum",
        "outputs": "all",
        "transport": "local",
        "weights": {},
        "init": print,
        "verify": False,
        "leaf_modules": ("0",),
    }
    options = fxpipe.compile(torch.nn.Linear(1, 1), 2, **given).options
    assert {name: getattr(options, name) for name in given} == given

"""Flags that several subcommands take, and the options of ``compile`` that they make."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from fxpipe.api import compile as compile_pipeline
from fxpipe.cli.models import ModelFile, load_model
from fxpipe.errors import OptionError
from fxpipe.pipeline import Pipeline
from fxpipe.schedule import SCHEDULES

Run = Callable[[argparse.Namespace], int]
"""Runs a subcommand; gives its exit status."""


class Subparsers(Protocol):
    """What ``ArgumentParser.add_subparsers`` returns."""

    def add_parser(self, name: str, **options: Any) -> argparse.ArgumentParser: ...


def add_command(
    commands: Subparsers, name: str, run: Run, *, about: str, example: str
) -> argparse.ArgumentParser:
    """A parser for one subcommand, with an example at the end of its help."""
    parser = commands.add_parser(
        name,
        help=about,
        description=f"{about[0].upper()}{about[1:]}.",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--traceback", action="store_true", help="show the whole traceback of an error"
    )
    parser.set_defaults(run=run)
    return parser


def add_model(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """The model to work on, and the seed it is built with."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?" if optional else None,
        help="FILE.py or package.module with a function make() that returns a mapping: model, "
        "args, and optionally kwargs, target, loss and other options of compile; flags override "
        "them",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="set before the model is built (default: %(default)s)"
    )


def add_compile_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``compile``, first those of a schedule."""
    group = parser.add_argument_group("schedule")
    group.add_argument("--stages", type=int, metavar="S", help="parts of the model")
    group.add_argument(
        "--microbatches", type=int, metavar="M", help="parts of the batch (4 * stages)"
    )
    group.add_argument("--schedule", metavar="NAME", help=f"{', '.join(SCHEDULES)} (1F1B)")
    group.add_argument("--chunks", type=int, metavar="V", help="stages a rank holds (1)")
    group = parser.add_argument_group("compile")
    group.add_argument(
        "--cuts", type=_names, metavar="A,B", help="modules or nodes at which a new stage starts"
    )
    group.add_argument(
        "--balance", metavar="WHAT", help="what balanced cuts even out: time, parameters (time)"
    )
    group.add_argument(
        "--loss-reduction", metavar="HOW", help="how microbatch losses combine: mean, sum (mean)"
    )
    group.add_argument(
        "--batch-dims",
        type=_dims,
        metavar="A=1,B=none",
        help="dimension along which an input is cut; none: every microbatch gets it whole (0)",
    )
    group.add_argument("--outputs", metavar="RANKS", help="which get the output: last, all (last)")
    group.add_argument("--engine", metavar="NAME", help="how a stage runs backward")
    group.add_argument(
        "--activation-checkpoint", metavar="WHICH", help="what is recomputed in backward"
    )
    group.add_argument(
        "--transport",
        metavar="NAME",
        help="auto, local, gloo, nccl (auto: between processes under torchrun)",
    )
    group.add_argument(
        "--weights", metavar="FILE", help="values of a model that is made on the meta device"
    )
    group.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        help="compare the stages with the model when it is compiled (if it is small)",
    )
    group.add_argument(
        "--leaf-modules", type=_names, metavar="A,B", help="modules that the trace keeps whole"
    )


SIZES = ("stages", "microbatches", "schedule", "chunks")
"""The options that a schedule has without a model."""

OF_A_MODEL = (
    "cuts",
    "balance",
    "batch_dims",
    "loss_reduction",
    "outputs",
    "engine",
    "activation_checkpoint",
    "transport",
    "weights",
    "verify",
    "leaf_modules",
)
"""The others. ``loss`` and ``init`` are functions: a model file gives them."""


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _dims(text: str) -> dict[str, int | None]:
    try:
        pairs = [part.split("=") for part in _names(text)]
        return {name: None if dim.lower() == "none" else int(dim) for name, dim in pairs}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form A=1,B=none") from None


def given(flags: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """The flags of these names that the user gave."""
    values = {name: getattr(flags, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def compile_options(flags: argparse.Namespace, found: ModelFile) -> dict[str, Any]:
    """Arguments of ``compile``: the flags, before what the model file says.

    Raises:
        OptionError: neither says how many stages.
    """
    options = {**found.options, **given(flags, SIZES), **given(flags, OF_A_MODEL)}
    if "stages" not in options:
        raise OptionError(
            "the number of stages is not given",
            at=str(flags.model),
            hint="pass --stages, or let make() return stages",
        )
    return options


def compiled(flags: argparse.Namespace) -> tuple[ModelFile, Pipeline]:
    """The model that was asked for, and its pipeline."""
    found = load_model(flags.model, seed=flags.seed)
    options = compile_options(flags, found)
    batch = (found.args, found.kwargs)
    return found, compile_pipeline(found.model, example_inputs=batch, **options)

"""``fxpipe check``: runs a model pipelined and plain, and says whether the bits agree."""

from __future__ import annotations

import argparse

from fxpipe.cli.flags import (
    Subparsers,
    add_command,
    add_compile_options,
    add_model,
    compile_options,
)
from fxpipe.cli.models import load_model
from fxpipe.verification import verify


def add_parser(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "check",
        run,
        about="compare a pipelined step with a plain one: outputs, loss, gradients and buffers",
        example="fxpipe check model.py --stages 4 --microbatches 8",
    )
    add_model(parser)
    add_compile_options(parser)
    parser.add_argument(
        "--tol",
        type=float,
        default=0.0,
        help="largest absolute difference that passes (0: equal bit for bit)",
    )


def run(flags: argparse.Namespace) -> int:
    """Prints the table; the status is 1 if something differs."""
    found = load_model(flags.model, seed=flags.seed)
    options = compile_options(flags, found)
    verification = verify(found.model, found.args, found.kwargs, found.target, **options)
    print(verification)
    return 0 if verification.within(flags.tol) else 1

"""``fxpipe compile``: cuts a model and says how; writes the scripts of its ranks."""

from __future__ import annotations

import argparse

from fxpipe.cli.flags import Subparsers, add_command, add_compile_options, add_model, compiled


def add_parser(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "compile",
        run,
        about="cut a model into stages and print the plan",
        example="fxpipe compile model.py --stages 4 --microbatches 16 --emit build/",
    )
    add_model(parser)
    add_compile_options(parser)
    parser.add_argument(
        "--emit", metavar="DIR", help="write scripts there that run without the compiler"
    )
    parser.add_argument(
        "--unroll", action="store_true", help="scripts without loops, one line an action"
    )


def run(flags: argparse.Namespace) -> int:
    """Prints the plan, and how to start what was written."""
    found, pipe = compiled(flags)
    print(pipe.report(), end="")
    if flags.emit is not None:
        batch = {"args": found.args, "kwargs": found.kwargs, "target": found.target}
        script = pipe.emit(flags.emit, unroll=flags.unroll, **batch)
        print(f"\ntorchrun --nproc-per-node {pipe.options.ranks} {script}")
    return 0

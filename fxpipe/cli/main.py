"""The command ``fxpipe``: finds the subcommand, reports errors, and prints on one rank alone."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from fxpipe.cli import check, compile, run, show, simulate
from fxpipe.errors import FxpipeError, RankError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: arguments without the program's name; None: those of this process.

    Returns:
        Exit status: 0; 1 if ``check`` found a difference; 2 after an `FxpipeError`, which is
        printed without its traceback.
    """
    flags = _parser().parse_args(argv)
    try:
        with _one_rank_prints(), _group_left_as_found():
            status: int = flags.run(flags)
    except FxpipeError as error:
        if flags.traceback:
            traceback.print_exc()
        elif not isinstance(error, RankError) or _rank() == 0:  # every rank raises a RankError
            print(error, file=sys.stderr)
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fxpipe",
        description="Cuts a PyTorch model into stages that run as a pipeline.",
        epilog="example:\n  fxpipe check model.py --stages 4 --microbatches 8\n  "
        "torchrun --nproc-per-node 4 -m fxpipe check model.py --stages 4 --microbatches 8",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (compile, show, simulate, run, check):
        command.add_parser(commands)
    return parser


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


@contextlib.contextmanager
def _one_rank_prints() -> Iterator[None]:
    if _rank() == 0:
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


@contextlib.contextmanager
def _group_left_as_found() -> Iterator[None]:
    """Ends the default group if the command made it."""
    was_initialized = dist.is_initialized()
    yield
    if dist.is_initialized() and not was_initialized:
        dist.barrier()  # a rank that ends breaks the transfers of those that still run
        dist.destroy_process_group()

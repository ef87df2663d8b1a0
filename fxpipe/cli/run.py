"""``fxpipe run``: trains a model on its batch for some steps."""

from __future__ import annotations

import argparse

import torch

from fxpipe.cli.flags import Subparsers, add_command, add_compile_options, add_model, compiled


def add_parser(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "run",
        run,
        about="train a model with SGD on its one batch, and print the loss of each step",
        example="torchrun --nproc-per-node 4 -m fxpipe run model.py --stages 4 --steps 10",
    )
    add_model(parser)
    add_compile_options(parser)
    group = parser.add_argument_group("training")
    group.add_argument("--steps", type=int, default=10, metavar="N", help="(%(default)s)")
    group.add_argument("--lr", type=float, default=0.01, help="learning rate (%(default)s)")
    group.add_argument("--momentum", type=float, default=0.0, help="of SGD (%(default)s)")
    group.add_argument("--clip-norm", type=float, metavar="X", help="clip gradients to this norm")


def run(flags: argparse.Namespace) -> int:
    """Prints one line a step."""
    found, pipe = compiled(flags)
    parameters = list(pipe.parameters())
    optimizer = None
    if parameters:  # a rank may hold none, and SGD takes no empty list
        optimizer = torch.optim.SGD(parameters, lr=flags.lr, momentum=flags.momentum)
    pipe.train()
    for step in range(1, flags.steps + 1):
        pipe.zero_grad()
        result = pipe.step(*found.args, target=found.target, **found.kwargs)
        line = f"step {step} loss {result.loss:.6f}"
        if flags.clip_norm is not None:
            line += f" norm {pipe.clip_grad_norm_(flags.clip_norm):.6f}"
        if optimizer is not None:
            optimizer.step()
        print(line, flush=True)
    return 0

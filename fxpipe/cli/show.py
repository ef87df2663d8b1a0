"""``fxpipe show``: prints what the compiler made, as text."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from fxpipe.cli.flags import Subparsers, add_command, add_compile_options, add_model, compiled
from fxpipe.cli.models import ModelFile
from fxpipe.compiler import compile_model, first_microbatch
from fxpipe.ir.text import format_graph
from fxpipe.manager import Step
from fxpipe.pipeline import Pipeline
from fxpipe.runtime.state import ModelState


def add_parser(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "show",
        run,
        about="print graphs, programs and the schedule of a model",
        example="fxpipe show model.py --stages 4 --graph 0 --program 0 --grid",
    )
    add_model(parser)
    add_compile_options(parser)
    group = parser.add_argument_group("what to print", "by default the plan and the schedule")
    group.add_argument(
        "--graph",
        type=int,
        nargs="*",
        metavar="STAGE",
        help="graphs of stages; of all if none is named",
    )
    group.add_argument(
        "--program",
        type=int,
        nargs="*",
        metavar="RANK",
        help="actions of ranks; of all if none is named",
    )
    group.add_argument("--passes", action="store_true", help="the graph after each pass")
    group.add_argument("--code", type=int, metavar="RANK", help="the script of a rank")
    group.add_argument(
        "--unroll", action="store_true", help="the script without loops, one line an action"
    )
    group.add_argument("--grid", action="store_true", help="the schedule, drawn")


def run(flags: argparse.Namespace) -> int:
    """Prints each part that is asked for, with an empty line between them."""
    found, pipe = compiled(flags)
    print("\n".join(_parts(flags, found, pipe)), end="")
    return 0


def _parts(flags: argparse.Namespace, found: ModelFile, pipe: Pipeline) -> Iterator[str]:
    asked = (flags.graph, flags.program, flags.code)
    if all(part is None for part in asked) and not (flags.passes or flags.grid):
        yield pipe.report()
        yield pipe.plan.grid()
    if flags.passes:
        yield from (_after(step) for step in _steps(found, pipe))
    if flags.graph is not None:
        for stage in flags.graph or range(pipe.options.stages):
            yield format_graph(pipe.graph(stage))
    if flags.program is not None:
        for rank in flags.program or range(pipe.options.ranks):
            yield f"rank {rank}: {' '.join(map(str, pipe.program(rank)))}\n"
    if flags.code is not None:
        batch = {"args": found.args, "kwargs": found.kwargs, "target": found.target}
        yield pipe.code(flags.code, unroll=flags.unroll, **batch)
    if flags.grid:
        yield pipe.plan.grid()


def _after(step: Step) -> str:
    text = step.after if step.modified else "  nothing changed\n"
    return f"=> {step.spec}\n{text}"


def _steps(found: ModelFile, pipe: Pipeline) -> tuple[Step, ...]:
    """What each pass does to the model when it is compiled as the pipeline was."""
    compiled_again = compile_model(
        found.model,
        first_microbatch(found.model, found.args, found.kwargs, pipe.options),
        pipe.options,
        canonical=ModelState(found.model).canonical,
        training=pipe.training,
    )
    return compiled_again.steps

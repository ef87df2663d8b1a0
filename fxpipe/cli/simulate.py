"""``fxpipe simulate``: how long a step takes and how much of it is idle, without running it."""

from __future__ import annotations

import argparse

from fxpipe.cli.flags import (
    OF_A_MODEL,
    SIZES,
    Subparsers,
    add_command,
    add_compile_options,
    add_model,
    compiled,
    given,
)
from fxpipe.errors import OptionError
from fxpipe.schedule import (
    Costs,
    Program,
    Routes,
    Schedule,
    Timeline,
    add_transfers,
    format_grid,
    make_schedule,
    simulate,
)


def add_parser(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "simulate",
        run,
        about="predict the bubble of a schedule, for equal stages or for those of a model",
        example="fxpipe simulate --stages 4 --microbatches 32 --grid",
    )
    add_model(parser, optional=True)
    add_compile_options(parser)
    group = parser.add_argument_group(
        "times", "in any unit; with a model in seconds, and estimated where no flag gives them"
    )
    group.add_argument(
        "--forward-cost",
        type=_times,
        metavar="T",
        help="of F, one number or one a stage: 1,2,1 (1)",
    )
    group.add_argument(
        "--backward-cost",
        type=_times,
        metavar="T",
        help="of B (2: two matrix products for each one of F)",
    )
    group.add_argument(
        "--latency", type=float, default=0.0, metavar="T", help="of a transfer (%(default)s)"
    )
    parser.add_argument("--grid", action="store_true", help="draw the schedule")


def _times(text: str) -> float | tuple[float, ...]:
    try:
        times = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number, nor several with commas"
        ) from None
    return times[0] if len(times) == 1 else times


def run(flags: argparse.Namespace) -> int:
    """Prints makespan, both bubbles, and the microbatches in flight."""
    if flags.model is None:
        schedule, timeline = _of_equal_stages(flags)
        unit = ""
    else:
        schedule, timeline = _of_model(flags)
        unit = " s"
    print(
        f"schedule {schedule.name}: {schedule.stages} stages on {schedule.ranks} ranks, "
        f"{schedule.microbatches} microbatches"
    )
    print(f"makespan {timeline.makespan:.6g}{unit}")
    print(f"bubble {timeline.bubble:.1%}, span bubble {timeline.span_bubble:.1%}")
    held = (f"rank {rank}: {n}" for rank, n in enumerate(timeline.peak_in_flight))
    print(f"microbatches in flight: {', '.join(held)}")
    if flags.grid:
        print()
        print(format_grid(timeline, cell=_cell(timeline)), end="")
    return 0


def _cell(timeline: Timeline) -> float:
    """The shortest action, but not so short that a line has more than some columns an action."""
    lengths = [span.end - span.start for rank in timeline.spans for span in rank]
    return max(min(lengths), sum(lengths) / len(lengths) / 2)


def _of_equal_stages(flags: argparse.Namespace) -> tuple[Schedule, Timeline]:
    """A chain of stages that differ in nothing but the costs in the flags."""
    for name in given(flags, OF_A_MODEL):
        raise OptionError(f"--{name.replace('_', '-')} needs a model", hint="name a MODEL")
    if flags.stages is None:
        raise OptionError("the number of stages is not given", hint="pass --stages, or a MODEL")
    sizes = {"schedule": "1F1B", "microbatches": 4 * flags.stages, **given(flags, SIZES)}
    schedule = make_schedule(sizes.pop("schedule"), **sizes)
    routes = Routes.chain(schedule.stages)
    costs = Costs(
        forward=1.0 if flags.forward_cost is None else flags.forward_cost,
        backward=2.0 if flags.backward_cost is None else flags.backward_cost,
        latency=flags.latency,
    )
    return schedule, _timeline(schedule, add_transfers(schedule, routes), routes, costs)


def _of_model(flags: argparse.Namespace) -> tuple[Schedule, Timeline]:
    _, pipe = compiled(flags)
    plan = pipe.plan
    forward, backward = flags.forward_cost, flags.backward_cost
    costs = Costs(
        forward=[s.forward_s for s in plan.stages] if forward is None else forward,
        backward=[s.backward_s for s in plan.stages] if backward is None else backward,
        latency=flags.latency,
    )
    return plan.schedule, _timeline(plan.schedule, plan.program, plan.routes, costs)


def _timeline(schedule: Schedule, program: Program, routes: Routes, costs: Costs) -> Timeline:
    return simulate(program, placement=schedule.placement, routes=routes, costs=costs)

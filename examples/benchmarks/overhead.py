"""What a pipeline runtime costs: fxpipe beside torch.distributed.pipelining, in the same processes.

::

    python examples/benchmarks/overhead.py                  # two ranks, which it starts itself
    torchrun --nproc-per-node 4 examples/benchmarks/overhead.py

Both libraries run the same stages over the same microbatches in the order 1F1B, each compute the
loss of every microbatch, give back the output of the whole batch on the last rank, and end with
the same gradients, which is checked. They take turns, and who begins changes every round: what
else the machine does meets both alike.

Two numbers come out, each below 1 where fxpipe is the cheaper one:

overhead
    Processor time of a step above that of its compute, where there is next to none of it. Compute
    is the same stages run alone, forward and backward, with nothing around them. Least of the
    rounds, summed over ranks: other work on the machine disturbs it least.
step
    Time on the clock of one step of a GPT, without an optimizer, by the slowest rank. Each round
    compares the two steps that stand next to each other in time; median of the rounds.

A step of fxpipe holds two things more: the loss of the batch is computed from those of its
microbatches, and sent to every rank.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from models import Workload, gpt, tiny
from tabulate import tabulate
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, SplitPoint, pipeline

import fxpipe

OURS, PEER, ALONE = "fxpipe", "torch.distributed.pipelining", "compute alone"


class Side:
    """One way to run the stage of this rank for a whole batch.

    Args:
        step: runs the batch forward and backward.
        parameters: those of the stage, in the order of the model.
    """

    def __init__(self, step: Callable[[], object], parameters: Iterable[nn.Parameter]) -> None:
        self.step, self.parameters = step, list(parameters)
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []

    def run(self) -> None:
        """Runs one step on its own, and keeps how long it took."""
        for parameter in self.parameters:
            parameter.grad = None
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        self.step()
        self.cpu_s.append(time.process_time() - cpu)
        self.wall_s.append(time.perf_counter() - wall)


def ours(work: Workload) -> Side:
    """The model, handed to fxpipe."""
    pipe = fxpipe.compile(
        copy.deepcopy(work.model),
        stages=dist.get_world_size(),
        loss=work.loss,
        microbatches=work.microbatches,
        cuts=work.cuts,
        example_inputs=((work.inputs,), {}),
    )
    step = functools.partial(pipe.step, work.inputs, target=work.target)
    return Side(step, pipe.parameters())


def peer(work: Workload, frontend: str) -> Side:
    """The model, handed to torch.

    Args:
        work: what to run.
        frontend: ``"manual"``: its stages, made by hand; ``"traced"``: the model and its cuts.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    work = copy.deepcopy(work)
    device = torch.device("cpu")
    if frontend == "manual":
        stage: Any = PipelineStage(work.stages()[rank], rank, ranks, device)
    else:
        rows = work.inputs[: len(work.inputs) // work.microbatches]
        split = dict.fromkeys(work.cuts, SplitPoint.BEGINNING)
        stage = pipeline(work.model, (rows,), split_spec=split).build_stage(rank, device)
    schedule = Schedule1F1B(stage, work.microbatches, loss_fn=work.loss)
    inputs = (work.inputs,) if rank == 0 else ()

    def step() -> object:
        if rank == ranks - 1:
            return schedule.step(*inputs, target=work.target, losses=[])
        return schedule.step(*inputs)

    return Side(step, stage.submod.parameters())


def alone(work: Workload) -> Side:
    """The stage of this rank as plain modules, fed with values of the right shapes."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    work = copy.deepcopy(work)
    stages = work.stages()
    stage = stages[rank]
    received = work.inputs.tensor_split(work.microbatches)
    targets = work.target.tensor_split(work.microbatches)
    with torch.no_grad():
        for before in stages[:rank]:
            received = tuple(before(x) for x in received)
        gradient = torch.ones_like(stage(received[0]))

    def step() -> None:
        for x, target in zip(received, targets, strict=True):
            output = stage(x if rank == 0 else x.detach().requires_grad_())
            if rank == ranks - 1:
                work.loss(output, target).backward()
            else:
                output.backward(gradient)

    return Side(step, stage.parameters())


def check_same_gradients(one: Side, other: Side) -> None:
    """Both did the same work, or they cannot be compared."""
    for a, b in zip(one.parameters, other.parameters, strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg="the two libraries gave other gradients")


def take_turns(sides: Mapping[str, Side], rounds: int) -> None:
    """Runs every side `rounds` times, in an order that turns around from round to round."""
    for side in sides.values():  # the first step makes buffers, and the second finds them made
        side.run()
        side.run()
        side.wall_s.clear()
        side.cpu_s.clear()
    check_same_gradients(sides[OURS], sides[PEER])
    for k in range(rounds):
        for side in list(sides.values())[:: 1 if k % 2 == 0 else -1]:
            side.run()


def gathered(value: object) -> list[Any]:
    """A value of every rank, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def measure_overhead(work: Workload, frontend: str, rounds: int) -> dict[str, Any]:
    """Processor time a microbatch, in us: of compute, and of each library above it, by rank."""
    sides = {OURS: ours(work), PEER: peer(work, frontend), ALONE: alone(work)}
    take_turns(sides, rounds)
    us = {
        name: [1e6 * s / work.microbatches for s in gathered(min(side.cpu_s))]
        for name, side in sides.items()
    }
    above = {
        name: [all_of_it - compute for all_of_it, compute in zip(us[name], us[ALONE], strict=True)]
        for name in (OURS, PEER)
    }
    ratio = sum(above[OURS]) / sum(above[PEER])
    return {"cpu_us_per_microbatch": {ALONE: us[ALONE], **above}, "ratio": ratio}


def measure_step(work: Workload, frontend: str, rounds: int) -> dict[str, Any]:
    """Time on the clock of a step, in ms, of each library: the slowest rank of each round."""
    sides = {OURS: ours(work), PEER: peer(work, frontend)}
    take_turns(sides, rounds)
    ms = {
        name: [1e3 * max(by_rank) for by_rank in zip(*gathered(side.wall_s), strict=True)]
        for name, side in sides.items()
    }
    ratios = [a / b for a, b in zip(ms[OURS], ms[PEER], strict=True)]
    return {"step_ms": ms, "ratio": statistics.median(ratios)}


def report(found: Mapping[str, Any]) -> str:
    """Both ratios, and the figures they come from."""
    overhead, step = found["overhead"], found["step"]
    ranks = len(overhead["cpu_us_per_microbatch"][ALONE])
    above = tabulate(
        [
            [name if name == ALONE else f"{name}, above it", *us, sum(us)]
            for name, us in overhead["cpu_us_per_microbatch"].items()
        ],
        headers=["CPU us a microbatch", *(f"rank {r}" for r in range(ranks)), "sum"],
        floatfmt=".0f",
    )
    clock = tabulate(
        [[name, statistics.median(ms), min(ms)] for name, ms in step["step_ms"].items()],
        headers=["ms a step of the GPT", "median", "least"],
        floatfmt=".1f",
    )
    ratios = tabulate(
        [["overhead", overhead["ratio"]], ["step", step["ratio"]]],
        headers=["fxpipe / torch", "ratio"],
        floatfmt=".3f",
    )
    return f"{above}\n\n{clock}\n\n{ratios}"


def run_rank(args: argparse.Namespace) -> None:
    """Measures on one of the ranks; rank 0 prints."""
    torch.set_num_threads(1)
    ranks = dist.get_world_size()
    small = tiny(ranks, args.microbatches)
    large = gpt(ranks, args.gpt_microbatches, blocks=args.blocks, width=args.width)
    found = {
        "ranks": ranks,
        "torch": torch.__version__,
        "frontend": args.frontend,
        "overhead": measure_overhead(small, args.frontend, args.rounds),
        "step": measure_step(large, args.frontend, args.gpt_rounds),
    }
    if dist.get_rank() == 0:
        print(report(found))
        if args.json is not None:
            args.json.write_text(json.dumps(found, indent=2) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def enter_rank(rank: int, args: argparse.Namespace, store: Path) -> None:
    """The start of a rank that this script has forked."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    run_rank(args)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="how many to start; torchrun says so itself")
    add("--frontend", choices=["manual", "traced"], default="manual", help="of torch")
    add("--microbatches", type=int, default=64, help="of the tiny model")
    add("--rounds", type=int, default=40, help="of the tiny model")
    add("--blocks", type=int, default=8, help="of the GPT")
    add("--width", type=int, default=128, help="of the GPT")
    add("--gpt-microbatches", type=int, default=8)
    add("--gpt-rounds", type=int, default=25)
    add("--json", type=Path, help="write all figures here")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        run_rank(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        # forked: a rank that is spawned imports torch again, for seconds
        mp.start_processes(enter_rank, (args, store), nprocs=args.ranks, start_method="fork")


if __name__ == "__main__":
    main()

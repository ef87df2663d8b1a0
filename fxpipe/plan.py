"""What the compiler decided, as data and as a report."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import tabulate

from fxpipe.compiler import Compiled, make_program
from fxpipe.ir.annotations import module_path_of, require_stage, routes_of, value_of
from fxpipe.ir.text import format_type
from fxpipe.options import CompileOptions
from fxpipe.schedule import Costs, Program, Routes, Schedule, Timeline, format_grid, simulate

_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """One stage of the plan.

    Args:
        index: s.
        rank: the rank that runs it.
        modules: first and last module of the model that it runs nodes of.
        nodes: number of graph nodes, transfers included.
        parameters: number of elements of the parameters it holds.
        parameter_bytes: their bytes.
        forward_s: estimated seconds of F for one microbatch.
        backward_s: estimated seconds of B; 0 where it never runs.
        sends: values it sends, each with its type and the stages that read it.
    """

    index: int
    rank: int
    modules: tuple[str, str]
    nodes: int
    parameters: int
    parameter_bytes: int
    forward_s: float
    backward_s: float
    sends: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Cuts, schedule, costs and transfers.

    Args:
        model: class of the model.
        front_end: what captured it: ``"fx"`` or ``"export"``.
        why_not: why a better front end could not; empty if the best did.
        cuts: first node of stages 1, 2, ...
        stages: one a stage.
        schedule: the order of compute.
        program: the order with transfers, one tuple a rank.
        routes: between which stages tensors and gradients go.
        tied: parameters that several stages hold.
    """

    model: str
    front_end: str
    why_not: str
    cuts: tuple[str, ...]
    stages: tuple[StagePlan, ...]
    schedule: Schedule
    program: Program
    routes: Routes
    tied: Mapping[str, tuple[int, ...]]

    def simulate(self) -> Timeline:
        """One step, from the estimated costs of the stages; transfers take no time."""
        costs = Costs(
            forward=[s.forward_s for s in self.stages],
            backward=[s.backward_s for s in self.stages],
        )
        return simulate(
            self.program, placement=self.schedule.placement, routes=self.routes, costs=costs
        )

    def report(self) -> str:
        """The plan as text: a table of stages, the schedule, and what to expect of it."""
        total = sum(s.forward_s + s.backward_s for s in self.stages) or 1.0
        rows = [
            {
                "stage": s.index,
                "rank": s.rank,
                "modules": " .. ".join(dict.fromkeys(s.modules)),
                "nodes": s.nodes,
                "parameters": s.parameters,
                "MiB": round(s.parameter_bytes / _MIB, 2),
                "cost": f"{(s.forward_s + s.backward_s) / total:.1%}",
                "sends": "\n".join(s.sends),
            }
            for s in self.stages
        ]
        timeline = self.simulate()
        shares = [(s.forward_s + s.backward_s) / total for s in self.stages]
        lines = [
            f"{self.model}: {len(self.stages)} stages on {self.schedule.ranks} ranks, "
            f"traced by {self.front_end}" + (f" ({self.why_not})" if self.why_not else ""),
            "",
            tabulate.tabulate(rows, headers="keys"),
            "",
            f"schedule {self.schedule.name}, {self.schedule.microbatches} microbatches: "
            f"predicted bubble {timeline.bubble:.1%}, "
            f"{_even_bubble(self.schedule):.1%} if all stages cost the same",
            f"slowest stage {shares.index(max(shares))} has {max(shares):.1%} of the cost, "
            f"{max(shares) * len(shares):.2f} times the mean",
            "microbatches in flight: "
            + ", ".join(f"rank {r}: {n}" for r, n in enumerate(timeline.peak_in_flight)),
        ]
        lines += [f"tied {n}: stages {', '.join(map(str, s))}" for n, s in self.tied.items()]
        return "\n".join(lines) + "\n"

    def grid(self) -> str:
        """The schedule as the grid the papers draw, every action one cell."""
        return format_grid(self.schedule)


def make_plan(
    compiled: Compiled, options: CompileOptions, microbatches: int, *, training: bool
) -> Plan:
    """The plan of a compiled model for M microbatches."""
    schedule, program = make_program(compiled, options, microbatches, forward_only=not training)
    return Plan(
        model=compiled.name,
        front_end=compiled.traced.front_end,
        why_not=compiled.traced.why,
        cuts=compiled.cuts,
        stages=tuple(_stage_plans(compiled, schedule.placement, training=training)),
        schedule=schedule,
        program=program,
        routes=compiled.routes if training else Routes(compiled.routes.forward, ()),
        tied=compiled.tied,
    )


def _stage_plans(
    compiled: Compiled, placement: Sequence[int], *, training: bool
) -> list[StagePlan]:
    plans = []
    for graph, stage, cost in zip(
        compiled.stage_graphs, compiled.stages, compiled.costs, strict=True
    ):
        nodes = [n for n in compiled.graph.graph.nodes if require_stage(n) == stage.index]
        paths = [p[-1][0] for n in nodes if (p := module_path_of(n)) and p[-1][0]]
        parameters = {id(p): p for p in stage.module.parameters()}.values()
        sends = [
            f"{n}: {format_type(value_of(n))} to {', '.join(str(r.target) for r in routes_of(n))}"
            for n in nodes
            if routes_of(n)
        ]
        plans.append(
            StagePlan(
                index=stage.index,
                rank=placement[stage.index],
                modules=(paths[0], paths[-1]) if paths else ("", ""),
                nodes=len(graph.module.graph.nodes),
                parameters=sum(p.numel() for p in parameters),
                parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
                forward_s=cost.forward_s,
                backward_s=cost.backward_s if training else 0.0,
                sends=tuple(sends),
            )
        )
    return plans


def _even_bubble(schedule: Schedule) -> float:
    """Bubble of the schedule where every stage takes the same time, B twice that of F."""
    from fxpipe.schedule import add_transfers

    routes = Routes.chain(schedule.stages)
    if not schedule.has_backward:
        routes = Routes(routes.forward, ())
    program = add_transfers(schedule, routes)
    costs = Costs(forward=1.0, backward=2.0)
    return simulate(program, placement=schedule.placement, routes=routes, costs=costs).bubble

"""From a module and a batch to stages that can run: the only file that knows the whole order."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn

from fxpipe import compat
from fxpipe.cost.flops import annotate_costs
from fxpipe.cost.table import NodeCost
from fxpipe.errors import OptionError
from fxpipe.ir.annotations import (
    canonical_name,
    find_cost,
    mutates_of,
    origin_of,
    require_stage,
    routes_of,
    set_canonical_names,
    tied_parameters,
    tied_routes,
    value_of,
)
from fxpipe.ir.cuts import placed_nodes
from fxpipe.ir.edges import state_names, state_of_graph
from fxpipe.ir.values import tensors_in
from fxpipe.manager import Pass, Step, run_passes
from fxpipe.options import CompileOptions
from fxpipe.passes import AssignStages, BalanceStages, FollowOwners, default_passes
from fxpipe.regions import outline_checkpoints
from fxpipe.runtime.microbatches import BatchDims, batch_dims_of
from fxpipe.runtime.stage import Stage, TensorLayout, layout_of
from fxpipe.schedule import Program, Routes, Schedule, add_transfers, make_schedule, verify
from fxpipe.shapes import ShapeProbe, edge_names
from fxpipe.split import StageGraph, peel, split_stages
from fxpipe.trace import Traced, trace
from fxpipe.trace.inputs import InputBinder, placeholder_names

log = logging.getLogger(__name__)

PREFETCH = 2
"""Compute actions by which a receive is posted ahead.

A message that finds its receive posted takes one way over gloo, another takes three. Between two
ranks on two busy cores, steps of 64 small messages each way took 60 to 80 ms with 2, 190 to 220 ms
with 1, and no less with 3. More buffers are full for longer, and on CUDA multiprocessors busy.
"""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A model in one mode, cut into stages.

    Args:
        name: class of the model.
        traced: the graph as captured, and how batches bind to it.
        graph: the whole graph after the passes, with send and recv nodes.
        steps: what each pass did.
        stage_graphs: one a stage, with send and recv nodes.
        stages: one a stage, ready to run.
        routes: between which stages tensors and gradients go.
        probe: finds the shapes of what crosses.
        batch_dims: along which dimension each input is cut.
        cuts: name of the first node of stages 1, 2, ...
        owners: stages that hold each parameter and buffer the graph reads, by canonical name.
        tied: those parameters that several stages hold.
        costs: cost of each stage for one microbatch.
    """

    name: str
    traced: Traced
    graph: fx.GraphModule
    steps: tuple[Step, ...]
    stage_graphs: tuple[StageGraph, ...]
    stages: tuple[Stage, ...]
    routes: Routes
    probe: ShapeProbe
    batch_dims: BatchDims
    cuts: tuple[str, ...]
    owners: Mapping[str, tuple[int, ...]]
    tied: Mapping[str, tuple[int, ...]]
    costs: tuple[NodeCost, ...]


@dataclasses.dataclass(frozen=True)
class Microbatch:
    """One microbatch of a batch, as the model is called with it.

    Args:
        args: positional inputs.
        kwargs: keyword inputs.
        dims: along which dimension each input of the batch was cut.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dims: BatchDims


def compile_model(
    model: nn.Module,
    example: Microbatch,
    options: CompileOptions,
    *,
    canonical: Mapping[str, str],
    training: bool,
    like: Compiled | None = None,
) -> Compiled:
    """Traces the model on one microbatch and cuts the graph.

    Args:
        model: in the mode that is wanted.
        example: the microbatch.
        options: checked options.
        canonical: first name of the same tensor, for every name of a parameter or buffer.
        training: backward will run.
        like: an earlier result for the same model; stages keep the parameters they have there.
    """
    start = time.perf_counter()
    traced = trace(model, example.args, example.kwargs, leaf_modules=options.leaf_modules)
    set_canonical_names(traced.module, canonical)
    annotate_costs(traced.module)
    passes = default_passes(_placing_pass(options, like), training=training)
    graph, steps = run_passes(traced.module, passes)
    stage_graphs = split_stages(graph)
    for stage in stage_graphs:
        outline_checkpoints(stage.module)
    input_index = {p.name: i for i, p in enumerate(traced.inputs.placeholders)}
    sizes = list(dict.fromkeys(name for s in stage_graphs for name in s.sizes))
    size_index = {name: i for i, name in enumerate(sizes)}
    origins = {n.name: origin_of(n) for n in graph.graph.nodes}
    stages = tuple(peel(s, input_index, size_index, origins) for s in stage_graphs)
    owners = _owners(graph)
    compiled = Compiled(
        name=type(model).__name__,
        traced=traced,
        graph=graph,
        steps=tuple(steps),
        stage_graphs=tuple(stage_graphs),
        stages=stages,
        routes=_routes(graph),
        probe=ShapeProbe(
            traced.module,
            edge_names(graph),
            sizes,
            _tied_layouts(graph),
            guards=traced.guards,
            training=training,
        ),
        batch_dims=dataclasses.replace(example.dims, written=_written_inputs(traced)),
        cuts=_cuts(graph),
        owners=owners,
        tied=dict(tied_parameters(graph)),
        costs=_stage_costs(graph, options.stages),
    )
    log.info(
        "compiled model=%s stages=%d nodes=%d edges=%d front_end=%s seconds=%.2f",
        type(model).__name__,
        options.stages,
        len(graph.graph.nodes),
        len(edge_names(graph)),
        traced.front_end,
        time.perf_counter() - start,
    )
    return compiled


def make_program(
    compiled: Compiled,
    options: CompileOptions,
    microbatches: int,
    *,
    forward_only: bool,
    prefetch: int = PREFETCH,
) -> tuple[Schedule, Program]:
    """The order of each rank, with transfers; proven complete and free of deadlock.

    Args:
        compiled: the model in one mode.
        options: with the name of the schedule.
        microbatches: M.
        forward_only: leave backward out.
        prefetch: how many compute actions a receive is posted ahead.

    Raises:
        ScheduleError: the schedule cannot run.
    """
    schedule = make_schedule(
        options.schedule,
        stages=options.stages,
        chunks=options.chunks,
        microbatches=microbatches,
        forward_only=forward_only,
    )
    routes = Routes(compiled.routes.forward, ()) if forward_only else compiled.routes
    program = add_transfers(schedule, routes, prefetch=prefetch)
    verify(
        program,
        placement=schedule.placement,
        routes=routes,
        microbatches=microbatches,
        forward_only=forward_only,
    )
    return schedule, program


@contextlib.contextmanager
def modes(model: nn.Module, training: Mapping[str, bool]) -> Iterator[None]:
    """Puts every module of the model in the mode given for its name; restores them at the end."""
    before = {module: module.training for module in model.modules()}
    try:
        for name, module in model.named_modules():
            module.training = training[name]
        yield
    finally:
        for module, mode in before.items():
            module.training = mode


def first_microbatch(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: CompileOptions
) -> Microbatch:
    """The first microbatch of a batch.

    Raises:
        OptionError: ``batch_dims`` names no parameter of forward.
        InputError: the batch does not bind to forward, or its inputs have not the same rows.
    """
    binder = InputBinder(model)
    unknown = sorted(set(options.batch_dims) - set(binder.signature.parameters))
    if unknown:
        raise OptionError(
            f"batch_dims names {unknown[0]!r}, which forward does not have",
            at=f"forward{binder.signature}",
            hint=f"parameters are: {', '.join(binder.signature.parameters)}",
        )
    bound = binder.bind(args, kwargs)
    inputs = [
        named
        for named, leaf in zip(placeholder_names(bound.structure), bound.leaves, strict=True)
        if isinstance(leaf, torch.Tensor)
    ]
    dims = batch_dims_of([n for _, n in inputs], [p for p, _ in inputs], options.batch_dims)
    count = min(options.wanted_microbatches, dims.rows(bound.tensors))
    piece = dims.split(bound.tensors, count)[0]
    replaced = iter(piece)
    leaves = [next(replaced) if isinstance(v, torch.Tensor) else v for v in bound.leaves]
    arguments = bound.structure.unflatten(leaves)
    return Microbatch(*binder.call_form(arguments, args, kwargs), dims)


def _written_inputs(traced: Traced) -> tuple[bool, ...]:
    """For each input, whether the model writes it, or a view of it, in place."""
    nodes = {n.name: n for n in traced.module.graph.nodes}
    written = {
        compat.storage_id(tensor)
        for node in nodes.values()
        for name in mutates_of(node)
        for tensor in tensors_in(value_of(nodes[name]))
    }
    inputs = [value_of(nodes[p.name]) for p in traced.inputs.placeholders]
    return tuple(compat.storage_id(value) in written for value in inputs)


def _placing_pass(options: CompileOptions, like: Compiled | None) -> Pass:
    if like is not None:
        return FollowOwners(options.stages, dict(like.owners), like.cuts)
    if options.cuts is not None:
        return AssignStages(tuple(options.cuts))
    return BalanceStages(options.stages, by=options.balance)


def _routes(graph: fx.GraphModule) -> Routes:
    routes = [r for n in graph.graph.nodes for r in routes_of(n)]
    forward = {(r.source, r.target) for r in routes}
    routes += [r for tied in tied_routes(graph).values() for r in tied]
    backward = {(r.target, r.gradient_to) for r in routes if r.gradient_to is not None}
    return Routes(tuple(sorted(forward)), tuple(sorted(backward)))


def _tied_layouts(graph: fx.GraphModule) -> list[TensorLayout]:
    """Layouts of the edges that carry gradients of parameters, by edge."""
    held = state_of_graph(graph)
    found = []
    for name, routes in tied_routes(graph).items():
        found += [layout_of(held[name])] * len(routes)
    return found


def _cuts(graph: fx.GraphModule) -> tuple[str, ...]:
    first: dict[int, str] = {}
    for node in placed_nodes(graph):
        if "val" in node.meta and not node.name.startswith("recv_"):
            first.setdefault(require_stage(node), node.name)
    return tuple(first[s] for s in sorted(first) if s > 0)


def _owners(graph: fx.GraphModule) -> dict[str, tuple[int, ...]]:
    found: dict[str, set[int]] = defaultdict(set)
    for node in graph.graph.nodes:
        for name in state_names(graph, node):
            found[canonical_name(graph, name)].add(require_stage(node))
    return {name: tuple(sorted(stages)) for name, stages in found.items()}


def _stage_costs(graph: fx.GraphModule, stages: int) -> tuple[NodeCost, ...]:
    total = [NodeCost() for _ in range(stages)]
    for node in graph.graph.nodes:
        if (cost := find_cost(node)) is not None:
            total[require_stage(node)] += cost
    return tuple(total)

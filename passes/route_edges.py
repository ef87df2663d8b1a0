"""Decides how each value gets to the stages that read it, and how its gradient comes back."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import ClassVar

from torch import fx

from fxpipe import compat
from fxpipe.ir import verify
from fxpipe.ir.annotations import (
    canonical_name,
    mutates_of,
    require_stage,
    set_routes,
    set_tied_routes,
    tied_parameters,
    value_of,
)
from fxpipe.ir.edges import (
    Edge,
    cross_stage_edges,
    feeds_output,
    needs_gradient,
    state_names,
    state_of_graph,
)
from fxpipe.ir.routes import Route
from fxpipe.ir.values import tensors_in
from fxpipe.manager import Pass


@dataclasses.dataclass(frozen=True)
class RouteEdges(Pass):
    """Sends a value straight to each stage that reads it, and its gradient from reader to reader.

    No gradient is sent where the value needs none, or where no path leads from its readers to an
    output of the model.

    Rewrite::

        stage 0               stage 0
          a = f(%x)             a = f(%x) -> stage 1 (edge 0, gradient to 0), stage 3 (edge 1, ...)
        stage 1               stage 1
          b = g(%a)      =>     b = g(%a)
        stage 3               stage 3
          c = h(%a)             c = h(%a)

    Args:
        chained_bytes: the gradient of a parameter that several stages hold goes the same way, with
            every microbatch, if it is not larger; else each stage adds up its own, and they are
            summed at the end of the step. The first gives the bits of the plain model, the second
            costs one transfer a step.
    """

    name: ClassVar[str] = "route-edges"
    requires: ClassVar = (verify.stages_assigned, verify.edges_point_forward)
    ensures: ClassVar = (verify.edges_routed,)

    chained_bytes: int = 4 * 2**20

    def run(self, gm: fx.GraphModule) -> fx.GraphModule:
        for node in gm.graph.nodes:
            set_routes(node, ())
        useful = feeds_output(gm)
        number = itertools.count()
        grouped = itertools.groupby(cross_stage_edges(gm), key=lambda edge: edge.producer)
        for producer, group in grouped:
            edges = [(next(number), edge) for edge in group]
            chain = [
                (index, edge.target)
                for index, edge in edges
                if needs_gradient(producer) and any(r in useful for r in edge.readers)
            ]
            back = [require_stage(producer), *(stage for _, stage in chain)]
            routes = []
            for index, edge in edges:
                to, after = None, None
                if (index, edge.target) in chain:
                    place = chain.index((index, edge.target))
                    to, after = back[place], (*chain[place + 1 :], None)[0]
                written = needs_gradient(producer) and _is_written(gm, edge)
                routes.append(Route(index, edge.source, edge.target, to, after, written))
            set_routes(producer, tuple(routes))
        set_tied_routes(gm, {n: _tied(s, number) for n, s in self._chained(gm, useful).items()})
        return gm

    def _chained(self, gm: fx.GraphModule, useful: set[fx.Node]) -> dict[str, tuple[int, ...]]:
        """The tied parameters whose gradients go from stage to stage with every microbatch."""
        chained = {}
        has_gradient = {canonical_name(gm, name) for n in useful for name in state_names(gm, n)}
        held = state_of_graph(gm)
        for name, stages in tied_parameters(gm).items():
            parameter = held[name]
            size = parameter.numel() * parameter.element_size()
            is_wanted = parameter.requires_grad and name in has_gradient
            if is_wanted and size <= self.chained_bytes:
                chained[name] = stages
        return chained


def _tied(stages: tuple[int, ...], number: Iterator[int]) -> tuple[Route, ...]:
    """For each stage but the first, the way of its gradient to the stage before it."""
    edges = [next(number) for _ in stages[1:]]
    after = [*zip(edges[1:], stages[2:], strict=True), None]
    return tuple(
        Route(edge, stages[0], stage, before, later)
        for edge, stage, before, later in zip(edges, stages[1:], stages, after, strict=False)
    )


def _is_written(gm: fx.GraphModule, edge: Edge) -> bool:
    """Whether the reading stage writes the value in place, under this or another name."""
    storage = {compat.storage_id(t) for t in tensors_in(value_of(edge.producer))}
    by_name = {n.name: n for n in gm.graph.nodes}
    for node in gm.graph.nodes:
        if require_stage(node) != edge.target:
            continue
        for name in mutates_of(node):
            if storage & {compat.storage_id(t) for t in tensors_in(value_of(by_name[name]))}:
                return True
    return False

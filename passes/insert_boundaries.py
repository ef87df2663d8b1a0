"""Puts a boundary between a value and its readers on another stage."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import fx

from fxpipe import ops
from fxpipe.ir import verify
from fxpipe.ir.annotations import (
    require_stage,
    routes_of,
    set_stage,
    set_value,
    value_of,
)
from fxpipe.ir.cuts import free_nodes
from fxpipe.ir.edges import cross_stage_edges
from fxpipe.ir.placement import read_instead
from fxpipe.manager import Pass


@dataclasses.dataclass(frozen=True)
class InsertBoundaries(Pass):
    """Each stage reads a value of another through one boundary at its head, in the order of edges.

    Rewrite::

        stage 0                            stage 0
          a = f(%x)                          a = f(%x)
        stage 1                            stage 1
          b = g(%a)                 =>       a_on_1 = boundary(%a, 0)
          c = h(%a)                          b = g(%a_on_1)
                                             c = h(%a_on_1)
    """

    name: ClassVar[str] = "insert-boundaries"
    requires: ClassVar = (verify.edges_routed,)
    ensures: ClassVar = (verify.boundaries_inserted,)

    def run(self, gm: fx.GraphModule) -> fx.GraphModule:
        free = free_nodes(gm)
        heads: dict[int, fx.Node] = {}
        for node in gm.graph.nodes:
            if node not in free or node.op == "get_attr":
                heads.setdefault(require_stage(node), node)
        for edge in list(cross_stage_edges(gm)):
            if [r.target for r in edge.readers] == [ops.boundary]:
                continue
            route = next(r for r in routes_of(edge.producer) if r.target == edge.target)
            with gm.graph.inserting_before(heads[edge.target]):
                boundary = gm.graph.call_function(ops.boundary, (edge.producer, route.edge))
            boundary.name = f"{edge.producer.name}_on_{edge.target}"
            set_stage(boundary, edge.target)
            set_value(boundary, value_of(edge.producer))
            for reader in edge.readers:
                read_instead(reader, edge.producer, boundary)
        return gm

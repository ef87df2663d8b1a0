"""Computes cheap values on each stage that reads them, so that they need not cross."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import fx

from fxpipe.ir import verify
from fxpipe.ir.annotations import require_stage, set_stage
from fxpipe.ir.cuts import free_nodes
from fxpipe.ir.placement import read_instead
from fxpipe.manager import Pass


@dataclasses.dataclass(frozen=True)
class ReplicateCheapNodes(Pass):
    """Gives each stage its own copy of parameters, and of sizes made from inputs, that it reads.

    Rewrite::

        stage 0                            stage 0
          size = size(%ids, 0)               size = size(%ids, 0)
          a = view(%x, %size)       =>       a = view(%x, %size)
        stage 1                            stage 1
          b = view(%y, %size)                size_1 = size(%ids, 0)
                                             b = view(%y, %size_1)
    """

    name: ClassVar[str] = "replicate-cheap-nodes"
    requires: ClassVar = (verify.stages_assigned,)
    ensures: ClassVar = (verify.stages_assigned, verify.edges_point_forward)

    def run(self, gm: fx.GraphModule) -> fx.GraphModule:
        free = free_nodes(gm)
        placed: set[fx.Node] = set()
        # Reversed: a copy of a node makes new readers of what the node reads.
        for node in [n for n in reversed(gm.graph.nodes) if n in free and n.op != "placeholder"]:
            readers: dict[int, list[fx.Node]] = {}
            for user in node.users:
                readers.setdefault(require_stage(user), []).append(user)
            for stage, users in sorted(readers.items()):
                first = _head(min(users), placed)  # nodes compare by their place in the graph
                if stage == require_stage(node):
                    first.prepend(node)
                    placed.add(node)
                    continue
                with gm.graph.inserting_before(first):
                    copy = gm.graph.node_copy(node, lambda n: n)
                set_stage(copy, stage)
                placed.add(copy)
                for user in users:
                    read_instead(user, node, copy)
        return gm


def _head(reader: fx.Node, placed: set[fx.Node]) -> fx.Node:
    """The first of the nodes that were placed before a reader: all keep their order."""
    while reader.prev in placed:
        reader = reader.prev
    return reader

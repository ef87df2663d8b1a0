"""Removes nodes nobody reads, and nothing else."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import fx

from fxpipe.ir.annotations import is_random, mutates_of, updates_buffers
from fxpipe.manager import Pass


@dataclasses.dataclass(frozen=True)
class RemoveDeadNodes(Pass):
    """Keeps every node that writes a tensor or a buffer, communicates, or draws random numbers.

    A random node nobody reads stays: without it, every later one would draw other numbers.

    Rewrite::

        a = relu(%x)                       add_ = add_(%y, 1)
        add_ = add_(%y, 1)        =>       return %y
        return %y
    """

    name: ClassVar[str] = "remove-dead-nodes"

    def run(self, gm: fx.GraphModule) -> fx.GraphModule:
        gm.graph.eliminate_dead_code(is_impure_node=_has_effect)
        return gm


def _has_effect(node: fx.Node) -> bool:
    return bool(
        node.op in ("placeholder", "output")
        or mutates_of(node)
        or updates_buffers(node)
        or is_random(node)
        or (node.op != "call_module" and node.is_impure())
    )

"""Gives each stage its own part of a region that the user opened around several of them."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import fx

from fxpipe import compat
from fxpipe.ir import verify
from fxpipe.ir.annotations import require_stage, set_stage, set_value
from fxpipe.ir.cuts import placed_nodes
from fxpipe.manager import Pass


@dataclasses.dataclass(frozen=True)
class ReopenRegions(Pass):
    """Closes autocast and no-gradient regions before each cut and opens them again behind it.

    Rewrite::

        stage 0                                 stage 0
          on = _enter_autocast(cpu, bf16)         on = _enter_autocast(cpu, bf16)
          a = fc1(%x)                             a = fc1(%x)
        stage 1                          =>       off = _exit_autocast(%on)
          b = fc2(%a)                           stage 1
          off = _exit_autocast(%on)               on_1 = _enter_autocast(cpu, bf16)
                                                  b = fc2(%a)
                                                  off_1 = _exit_autocast(%on_1)
    """

    name: ClassVar[str] = "reopen-regions"
    requires: ClassVar = (verify.stages_assigned,)
    ensures: ClassVar = (verify.regions_closed,)

    def run(self, gm: fx.GraphModule) -> fx.GraphModule:
        autocasts: list[fx.Node] = []  # open here, outermost first
        has_gradients = True
        before: fx.Node | None = None
        for node in placed_nodes(gm):
            if before is not None and require_stage(before) != require_stage(node):
                _close(gm.graph, node, require_stage(before), autocasts, has_gradients)
                autocasts = _open(gm.graph, node, autocasts, has_gradients)
            if node.target is compat.enter_autocast:
                autocasts.append(node)
            elif node.target is compat.exit_autocast:
                node.args = (autocasts.pop(),)
            elif node.target is compat.set_grad_enabled:
                has_gradients = bool(node.args[0])
            before = node
        return gm


def _close(
    graph: fx.Graph, at: fx.Node, stage: int, autocasts: list[fx.Node], has_gradients: bool
) -> None:
    for entered in reversed(autocasts):
        _insert(graph, at, stage, compat.exit_autocast, (entered,))
    if not has_gradients:
        _insert(graph, at, stage, compat.set_grad_enabled, (True,))


def _open(
    graph: fx.Graph, at: fx.Node, autocasts: list[fx.Node], has_gradients: bool
) -> list[fx.Node]:
    stage = require_stage(at)
    if not has_gradients:
        _insert(graph, at, stage, compat.set_grad_enabled, (False,))
    return [_insert(graph, at, stage, compat.enter_autocast, n.args) for n in autocasts]


def _insert(
    graph: fx.Graph, at: fx.Node, stage: int, target: fx.node.Target, args: tuple[object, ...]
) -> fx.Node:
    with graph.inserting_before(at):
        node = graph.create_node("call_function", target, args)  # type: ignore[arg-type]
    set_stage(node, stage)
    set_value(node, None)
    return node

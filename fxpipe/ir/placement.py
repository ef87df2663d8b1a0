"""Gives every node its stage, once it is known where the stages start."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import fx

from fxpipe.ir.annotations import (
    mutates_of,
    require_stage,
    result_is_of,
    set_mutates,
    set_result_is,
    set_stage,
    set_stage_count,
)
from fxpipe.ir.cuts import placed_nodes


def place(gm: fx.GraphModule, starts: Sequence[int]) -> None:
    """Stamps every node with its stage.

    Args:
        gm: the graph.
        starts: index, among the placed nodes, of the first node of stages 1, 2, ...; ascending.
    """
    set_stage_count(gm, len(starts) + 1)
    placed = placed_nodes(gm)
    bounds = [0, *starts, len(placed)]
    for stage, (first, end) in enumerate(itertools.pairwise(bounds)):
        for node in placed[first:end]:
            set_stage(node, stage)
    known = set(placed)
    for node in reversed(gm.graph.nodes):  # a node's users have a stage before it has one
        if node.op == "output":
            set_stage(node, len(starts))
        elif node not in known:
            set_stage(node, min((require_stage(u) for u in node.users), default=0))


def read_instead(reader: fx.Node, old: fx.Node, new: fx.Node) -> None:
    """Makes `reader` read `new` where it read `old`, also in what is noted about its writes."""
    reader.replace_input_with(old, new)
    set_mutates(reader, tuple(new.name if n == old.name else n for n in mutates_of(reader)))
    if result_is_of(reader) == old.name:
        set_result_is(reader, new.name)

"""Invariants of a staged graph, one function each, named after the fact it asserts."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import fx

from fxpipe import compat, ops
from fxpipe.errors import VerifyError
from fxpipe.ir.annotations import (
    mutates_of,
    require_stage,
    routes_of,
    source_of,
    stage_count,
    value_of,
)
from fxpipe.ir.edges import cross_stage_edges


def _at(node: fx.Node) -> str:
    source = source_of(node)
    return f"%{node} = {node.target}" + (f", {source}" if source else "")


_WITHOUT_VALUE = (compat.enter_autocast, compat.exit_autocast, compat.set_grad_enabled)


def values_known(gm: fx.GraphModule) -> None:
    """Every node knows the fake value it stands for; what opens or closes a region has none."""
    for node in gm.graph.nodes:
        if node.op == "output" or node.target in _WITHOUT_VALUE:
            continue
        if "val" not in node.meta:
            raise VerifyError(
                f"node %{node} has no value", at=_at(node), hint="trace with example inputs"
            )


def stages_assigned(gm: fx.GraphModule) -> None:
    """Every node has a stage, and no stage is empty."""
    found = {require_stage(node) for node in gm.graph.nodes}
    empty = sorted(set(range(stage_count(gm))) - found)
    if empty:
        raise VerifyError(f"stages {empty} of {stage_count(gm)} hold no node")


def edges_point_forward(gm: fx.GraphModule) -> None:
    """No node reads a value of a later stage."""
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            continue
        for user in node.users:
            if require_stage(user) < require_stage(node):
                raise VerifyError(
                    f"edge %{node} -> %{user} goes back from stage {require_stage(node)} "
                    f"to stage {require_stage(user)}",
                    at=_at(user),
                    hint=f"give %{user} stage {require_stage(node)} or later",
                )


def edges_carry_tensors(gm: fx.GraphModule) -> None:
    """What crosses is a single tensor, never a container of tensors."""
    for edge in cross_stage_edges(gm):
        if not isinstance(value_of(edge.producer), torch.Tensor):
            raise VerifyError(
                f"%{edge.producer} is a {type(value_of(edge.producer)).__name__} of tensors "
                f"and is read by stage {edge.target}",
                at=_at(edge.producer),
                hint="cut before it, or after what unpacks it",
            )


def edges_routed(gm: fx.GraphModule) -> None:
    """Every cross-stage edge has one route, and edge numbers are unique."""
    seen: set[int] = set()
    for edge in cross_stage_edges(gm):
        routes = [r for r in routes_of(edge.producer) if r.target == edge.target]
        if len(routes) != 1 or routes[0].edge in seen:
            raise VerifyError(
                f"%{edge.producer} has {len(routes)} routes to stage {edge.target}",
                at=_at(edge.producer),
                hint="run route-edges",
            )
        seen.add(routes[0].edge)


def boundaries_inserted(gm: fx.GraphModule) -> None:
    """A value of another stage is read by one boundary node in each reading stage."""
    for edge in cross_stage_edges(gm):
        if [r.target for r in edge.readers] != [ops.boundary]:
            raise VerifyError(
                f"%{edge.producer} of stage {edge.source} is read in stage {edge.target} "
                "without a boundary",
                at=_at(edge.readers[0]),
                hint="run insert-boundaries",
            )


def no_cross_stage_edges(gm: fx.GraphModule) -> None:
    """No stage reads a tensor of another except by a transfer."""
    for edge in cross_stage_edges(gm):
        raise VerifyError(
            f"%{edge.producer} of stage {edge.source} is read by stage {edge.target} "
            "without a transfer",
            at=_at(edge.readers[0]),
            hint="run lower-edges",
        )


def transfers_in_order(gm: fx.GraphModule) -> None:
    """Between two stages values are received in the order they are sent: NCCL matches by order."""
    sends: dict[tuple[int, int], list[int]] = defaultdict(list)
    recvs: dict[tuple[int, int], list[int]] = defaultdict(list)
    for node in gm.graph.nodes:
        if node.target is ops.send:
            _, _, target, edge = node.args
            sends[require_stage(node), target].append(edge)
        elif node.target is ops.recv:
            *_, source, edge = node.args
            recvs[source, require_stage(node)].append(edge)
    for pair in sorted(sends | recvs):
        if sends[pair] != recvs[pair]:
            raise VerifyError(
                f"stage {pair[0]} sends edges {sends[pair]} to stage {pair[1]}, "
                f"which receives {recvs[pair]}",
                hint="receive in the order of sending",
            )


def sent_values_final(gm: fx.GraphModule) -> None:
    """A value is not written in place after it was sent: the write would race with the send."""
    sent: set[str] = set()
    for node in gm.graph.nodes:
        for name in mutates_of(node):
            if name in sent:
                raise VerifyError(
                    f"%{node} writes %{name} in place after it was sent",
                    at=_at(node),
                    hint="send the result of the write",
                )
        if node.target is ops.send:
            sent.add(str(node.args[0]))


def regions_closed(gm: fx.GraphModule) -> None:
    """An autocast region is left on the stage on which it was entered."""
    for node in gm.graph.find_nodes(op="call_function", target=compat.exit_autocast):
        for entered in node.all_input_nodes:
            if require_stage(entered) != require_stage(node):
                raise VerifyError(
                    f"the region opened by %{entered} on stage {require_stage(entered)} "
                    f"is closed on stage {require_stage(node)}",
                    at=_at(node),
                    hint="run reopen-regions",
                )

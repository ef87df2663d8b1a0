"""Cuts a staged graph into one graph a stage, and separates compute from communication.

**Terms.** A *stage graph* holds the nodes of one stage with its ``recv`` and ``send`` operators; it
can be printed, pickled, retraced and run as it is, inside ``ops.port``. *Peeling* turns its
receives into placeholders and its sends into outputs: what is left is pure compute, and the
schedule decides when tensors travel.

**Signatures.** ``split_stages(gm) -> list[StageGraph]``; ``peel(stage_graph) -> Stage``.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, cast

from torch import Tensor, fx, nn

from fxpipe import compat, ops
from fxpipe.ir.annotations import (
    require_stage,
    routes_of,
    set_stage,
    set_value,
    stage_count,
    tied_routes,
)
from fxpipe.ir.edges import attribute
from fxpipe.ir.routes import Route
from fxpipe.runtime.stage import OutputGradient, Receive, Send, Stage, TiedLink


@dataclasses.dataclass(frozen=True)
class StageGraph:
    """One stage of the model, with its transfers.

    Args:
        index: s, 0 <= s < S.
        module: placeholders are ``mb``, the inputs of the model that the stage reads, and sizes
            that other stages compute. The last stage returns the flat outputs of the model.
        inputs: names of the model's inputs among the placeholders.
        sizes: names, in the traced graph, of the sizes among the placeholders.
        routes: routes of every edge that touches the stage, by edge.
        tied: gradients of parameters that other stages hold too.
    """

    index: int
    module: fx.GraphModule
    inputs: tuple[str, ...]
    sizes: tuple[str, ...]
    routes: Mapping[int, Route]
    tied: tuple[TiedLink, ...] = ()


def split_stages(gm: fx.GraphModule) -> list[StageGraph]:
    """One graph a stage, from a graph whose edges are lowered. Parameters are shared."""
    routes = {r.edge: r for node in gm.graph.nodes for r in routes_of(node)}
    return [_stage_graph(gm, s, routes) for s in range(stage_count(gm))]


def _stage_graph(gm: fx.GraphModule, stage: int, routes: Mapping[int, Route]) -> StageGraph:
    own = [n for n in gm.graph.nodes if require_stage(n) == stage and n.op != "placeholder"]
    read = dict.fromkeys(i for n in own for i in n.all_input_nodes)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    outside = [n for n in gm.graph.nodes if n in read and (n.op == "placeholder" or n not in own)]
    index = graph.placeholder("mb")
    set_value(index, 0)
    set_stage(index, stage)
    inputs = [n for n in outside if n.op == "placeholder" and n.target != "mb"]
    sizes = [n for n in outside if n.op != "placeholder"]
    for node in outside:
        if node.target == "mb" and node.op == "placeholder":
            copies[node] = index
    for node in [*inputs, *sizes]:
        copies[node] = graph.create_node("placeholder", node.name, name=node.name)
        copies[node].meta = copy.copy(node.meta)
    for node in own:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    if stage != stage_count(gm) - 1:
        graph.output(())
    graph.lint()
    module = fx.GraphModule(_stage_root(gm, own), graph, class_name=f"Stage{stage}")
    edges = {
        int(n.args[-1]): routes[int(n.args[-1])] for n in own if n.target in (ops.send, ops.recv)
    }
    return StageGraph(
        stage,
        module,
        tuple(str(n.target) for n in inputs),
        tuple(n.name for n in sizes),
        edges,
        tuple(_tied_links(gm, stage)),
    )


def _tied_links(gm: fx.GraphModule, stage: int) -> Iterator[TiedLink]:
    for name, routes in tied_routes(gm).items():
        if stage == routes[0].source:
            yield TiedLink(name, -1, None, (routes[0].edge, routes[0].target))
        for route in routes:
            if route.target == stage:
                yield TiedLink(name, route.edge, route.gradient_to, route.gradient_from)


# --------------------------------------------------------------------------------------------
# The module of a stage


def _stage_root(gm: fx.GraphModule, nodes: list[fx.Node]) -> nn.Module:
    """A module that holds, under their original names, what the nodes of one stage use."""
    root = nn.Module()
    for node in nodes:
        if node.op == "call_module":
            target = str(node.target)
            _container(root, target).add_module(
                target.rpartition(".")[2], compat.share_module(gm.get_submodule(target))
            )
    for node in nodes:
        if node.op == "get_attr":
            _add_attribute(root, str(node.target), attribute(gm, str(node.target)), gm)
    return root


def _container(root: nn.Module, target: str) -> nn.Module:
    """The module that holds the last part of a dotted name, made on the way down."""
    for part in target.split(".")[:-1]:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    return root


def _add_attribute(root: nn.Module, target: str, value: object, gm: fx.GraphModule) -> None:
    holder, name = _container(root, target), target.rpartition(".")[2]
    if hasattr(holder, name):
        return
    if isinstance(value, nn.Parameter):
        holder.register_parameter(name, value)
    elif isinstance(value, Tensor):
        holder.register_buffer(name, value, persistent=_is_persistent(gm, target))
    elif isinstance(value, nn.Module):
        holder.add_module(name, compat.share_module(value))
    else:
        setattr(holder, name, value)


def _is_persistent(gm: fx.GraphModule, target: str) -> bool:
    path, _, name = target.rpartition(".")
    return name not in compat.non_persistent_buffers(gm.get_submodule(path))


# --------------------------------------------------------------------------------------------
# Peeling


def peel(
    stage: StageGraph,
    input_index: Mapping[str, int],
    size_index: Mapping[str, int],
    origins: Mapping[str, str],
) -> Stage:
    """Separates the compute of a stage from its transfers.

    Args:
        stage: the stage, with ``send`` and ``recv`` operators.
        input_index: position of each of the model's inputs.
        size_index: position of each size in ``Layout.sizes``.
        origins: module and source line of each node, for error messages.
    """
    source = stage.module.graph
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    receives = sorted(source.find_nodes(op="call_function", target=ops.recv), key=_edge)
    sends = sorted(source.find_nodes(op="call_function", target=ops.send), key=_edge)
    placeholders = [n for n in source.find_nodes(op="placeholder") if n.target != "mb"]
    for node in [*placeholders, *receives]:
        copies[node] = graph.create_node("placeholder", node.name, name=node.name)
        copies[node].meta = copy.copy(node.meta)
    outputs: list[fx.Node] = []
    model_outputs: tuple[Any, ...] = ()
    for node in source.nodes:
        if node in copies or node.op == "placeholder" or node.target is ops.send:
            continue
        if node.op == "output":
            model_outputs = tuple(fx.map_arg(node.args[0], copies.__getitem__))
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    sent = list(dict.fromkeys(node.args[0] for node in sends))
    outputs = [copies[n] for n in sent]
    graph.output((*outputs, *model_outputs))
    graph.lint()
    return Stage(
        index=stage.index,
        module=fx.GraphModule(stage.module, graph, class_name=f"Stage{stage.index}Compute"),
        batch_inputs=tuple(input_index[name] for name in stage.inputs),
        sizes=tuple(size_index[name] for name in stage.sizes),
        receives=tuple(_receive(n, stage.routes) for n in receives),
        sends=tuple(Send(_edge(n), int(n.args[2]), sent.index(n.args[0])) for n in sends),
        gradients=tuple(_gradients(stage, sends, sent)),
        tied=stage.tied,
        num_sent=len(sent),
        origins={n.name: origins[n.name] for n in graph.nodes if n.name in origins},
    )


def _gradients(
    stage: StageGraph, sends: list[fx.Node], sent: list[Any]
) -> Iterator[OutputGradient]:
    for node in sends:
        route = stage.routes[_edge(node)]
        if route.gradient_to == stage.index:
            yield OutputGradient(route.edge, route.target, sent.index(node.args[0]))


def _edge(node: fx.Node) -> int:
    return int(cast(int, node.args[-1]))


def _receive(node: fx.Node, routes: Mapping[int, Route]) -> Receive:
    route = routes[_edge(node)]
    name = node.name.removeprefix("recv_").removesuffix(f"_{route.target}")
    return Receive(
        route.edge, name, route.source, route.gradient_to, route.gradient_from, route.written
    )

"""Gives the activation checkpoint regions of the user's code their meaning in a stage graph.

The trace marks each node with the number of the region it was called in. Here a stretch of nodes of
one region becomes one module that recomputes them in backward; a region that was cut becomes one
module on each of its stages.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping

from torch import fx

from fxpipe import ops
from fxpipe.ir.annotations import checkpoint_region_of, set_value, value_of
from fxpipe.runtime.regions import CheckpointRegion


def outline_checkpoints(gm: fx.GraphModule) -> fx.GraphModule:
    """Turns each marked stretch of a stage graph into a call of a ``CheckpointRegion``.

    Parameters and modules are read outside and handed in; transfers stay outside, since they would
    be repeated.
    """
    _send_after_regions(gm.graph)
    for number, nodes in enumerate(_stretches(gm.graph)):
        _outline(gm, f"checkpoint_{number}", nodes)
    gm.graph.lint()
    gm.recompile()
    return gm


def _send_after_regions(graph: fx.Graph) -> None:
    """Moves sends from between the nodes of a region to behind it."""
    waiting: list[fx.Node] = []
    region: int | None = None
    for node in list(graph.nodes):
        if node.target is ops.send and region is not None:
            waiting.append(node)
        elif checkpoint_region_of(node) != region and node.op != "get_attr":
            for sent in waiting:
                node.prepend(sent)
            waiting, region = [], checkpoint_region_of(node)


def _stretches(graph: fx.Graph) -> Iterable[list[fx.Node]]:
    """Runs of nodes of one region, in graph order; what reads parameters does not end one."""
    found: list[list[fx.Node]] = []
    last: int | None = None
    for node in graph.nodes:
        if node.op == "get_attr":
            continue
        region = checkpoint_region_of(node) if node.op.startswith("call") else None
        if region is not None:
            if region != last:
                found.append([])
            found[-1].append(node)
        last = region
    return found


def _outline(gm: fx.GraphModule, name: str, nodes: list[fx.Node]) -> None:
    inside = set(nodes)
    read = dict.fromkeys(i for n in nodes for i in n.all_input_nodes if i not in inside)
    given = [n for n in nodes if any(u not in inside for u in n.users)]
    modules = _read_modules(gm.graph, nodes)
    body = fx.Graph()
    copies = {i: body.placeholder(i.name) for i in [*read, *modules.values()]}
    for node in nodes:
        if node.op == "call_module":
            args = (copies[modules[str(node.target)]], *fx.map_arg(node.args, copies.get))
            kwargs = dict(fx.map_arg(node.kwargs, copies.get))
            copies[node] = body.call_function(operator.call, args, kwargs)
        else:
            copies[node] = body.node_copy(node, copies.__getitem__)
    body.output(tuple(copies[n] for n in given))
    gm.add_submodule(name, CheckpointRegion(fx.GraphModule(gm, body, class_name="Region")))
    for i in read:
        if i.op == "get_attr":  # a parameter may be read in between
            nodes[0].prepend(i)
    with gm.graph.inserting_after(nodes[-1]):
        call = gm.graph.call_module(name, (*read, *modules.values()))
    set_value(call, tuple(value_of(n) for n in given))
    _replace(gm.graph, call, {n: i for i, n in enumerate(given)})
    for node in reversed(nodes):
        gm.graph.erase_node(node)


def _read_modules(graph: fx.Graph, nodes: list[fx.Node]) -> dict[str, fx.Node]:
    """A node before the stretch that reads each module called in it.

    The region is handed modules as it is handed parameters: the stage keeps them under their names.
    """
    targets = dict.fromkeys(str(n.target) for n in nodes if n.op == "call_module")
    with graph.inserting_before(nodes[0]):
        return {target: graph.get_attr(target) for target in targets}


def _replace(graph: fx.Graph, call: fx.Node, index: Mapping[fx.Node, int]) -> None:
    after = call
    for node, i in index.items():
        with graph.inserting_after(after):
            item = graph.call_function(operator.getitem, (call, i), name=f"{node.name}_kept")
        item.meta = dict(node.meta)
        node.replace_all_uses_with(item)
        after = item

"""Which values cross from one stage to another, and which parameters a stage holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
from torch import fx, nn

from fxpipe import compat, ops
from fxpipe.ir.annotations import canonical_name, mutates_of, require_stage, value_of
from fxpipe.ir.values import has_tensor, tensors_in


class Edge(NamedTuple):
    """A value and the nodes of one other stage that read it."""

    producer: fx.Node
    readers: tuple[fx.Node, ...]
    source: int
    target: int


def cross_stage_edges(gm: fx.GraphModule) -> Iterator[Edge]:
    """Edges in graph order, one for each pair of value and reading stage, targets ascending.

    Inputs of the model are no edges: every rank is given the batch. Neither are values without a
    tensor, such as sizes: every rank computes them from the shapes of the microbatch.
    """
    for node in list(gm.graph.nodes):
        if node.op in ("placeholder", "output") or node.target is ops.send:
            continue
        if not has_tensor(value_of(node)):
            continue
        readers: dict[int, list[fx.Node]] = {}
        for user in node.users:
            if require_stage(user) != require_stage(node):
                readers.setdefault(require_stage(user), []).append(user)
        for stage, users in sorted(readers.items()):
            yield Edge(node, tuple(users), require_stage(node), stage)


def needs_gradient(node: fx.Node) -> bool:
    """Whether a gradient flows to the value of this node, or to part of it, in the plain model."""
    return any(tensor.requires_grad for tensor in tensors_in(value_of(node)))


def feeds_output(gm: fx.GraphModule) -> set[fx.Node]:
    """The nodes from which a differentiable path leads to an output of the model.

    A path also leads from what is written into a tensor to what reads that memory later.
    """
    position = {n: i for i, n in enumerate(gm.graph.nodes)}
    writes = _writes(gm)
    found: set[fx.Node] = set()
    waiting = [n for n in gm.graph.nodes if n.op == "output"]
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        found.add(node)
        for read in node.all_input_nodes:
            if needs_gradient(read) or read.op == "get_attr":
                waiting.append(read)
            for tensor in tensors_in(value_of(read)):
                earlier = writes.get(compat.storage_id(tensor), ())
                waiting += [w for w in earlier if position[w] < position[node]]
    return found


def _writes(gm: fx.GraphModule) -> dict[int, list[fx.Node]]:
    """The nodes that write in place, by the memory they write."""
    by_name = {n.name: n for n in gm.graph.nodes}
    writes: dict[int, list[fx.Node]] = defaultdict(list)
    for node in gm.graph.nodes:
        for name in mutates_of(node):
            for tensor in tensors_in(value_of(by_name[name])):
                writes[compat.storage_id(tensor)].append(node)
    return writes


def attribute(root: nn.Module, target: str) -> object:
    """The object at a dotted path below `root`."""
    value: object = root
    for part in target.split("."):
        value = getattr(value, part)
    return value


def state_names(gm: fx.GraphModule, node: fx.Node) -> Iterator[str]:
    """Dotted names of the parameters and buffers a node reads from the module."""
    if node.op == "get_attr":
        if isinstance(attribute(gm, str(node.target)), torch.Tensor):
            yield str(node.target)
    elif node.op == "call_module":
        module = gm.get_submodule(str(node.target))
        for name, _ in module.named_parameters(remove_duplicate=False):
            yield f"{node.target}.{name}"
        for name, _ in module.named_buffers(remove_duplicate=False):
            yield f"{node.target}.{name}"


def state_of_graph(gm: fx.GraphModule) -> dict[str, torch.Tensor]:
    """The parameters and buffers that the nodes read, by canonical name.

    A graph may know a tensor by another of its names alone.
    """
    return {
        canonical_name(gm, name): cast(torch.Tensor, attribute(gm, name))
        for node in gm.graph.nodes
        for name in state_names(gm, node)
    }

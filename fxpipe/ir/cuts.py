"""Where a graph may be cut: which nodes stay together, and which belong to no place.

**Terms.** A *free* node is computed wherever it is read: inputs, parameters, and sizes made of
them. The other nodes are *placed*; a cut stands before a placed node, and all placed nodes before
it belong to earlier stages.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from typing import cast

import torch
from torch import fx, nn

from fxpipe import compat
from fxpipe.ir.annotations import (
    find_cost,
    is_random,
    mutates_of,
    result_is_of,
    updates_buffers,
    value_of,
)
from fxpipe.ir.edges import attribute, state_names
from fxpipe.ir.values import has_tensor, tensors_in


def free_nodes(gm: fx.GraphModule) -> set[fx.Node]:
    """Inputs, parameters and buffers, and what is cheap to make of them on any stage.

    Cheap are sizes, and tensors without a gradient that a few operations an element make from
    inputs, buffers and sizes: masks, positions, rotary tables. Nothing random, nothing that is
    written in place.
    """
    written = _written_storages(gm)
    free: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr") or (
            node.op in ("call_function", "call_method")
            and not (node.is_impure() or is_random(node) or updates_buffers(node))
            and (_is_free_size(node, free) or _is_cheap_tensor(gm, node, free, written))
        ):
            free.add(node)
    return free


def _is_free_size(node: fx.Node, free: set[fx.Node]) -> bool:
    value = value_of(node)
    if value is None or has_tensor(value):
        return False
    return bool(node.all_input_nodes) and all(n in free for n in node.all_input_nodes)


_CHEAP_FLOPS_PER_ELEMENT = 64
"""A product over a handful of elements, as rotary tables need, is cheap; a projection is not."""


def _is_cheap_tensor(
    gm: fx.GraphModule, node: fx.Node, free: set[fx.Node], written: set[int]
) -> bool:
    value = value_of(node)
    if not isinstance(value, torch.Tensor) or value.requires_grad:
        return False
    # sizes of activations may be read too: every rank knows them without a transfer
    if any(n not in free and has_tensor(value_of(n)) for n in node.all_input_nodes):
        return False
    read = [value, *(t for n in node.all_input_nodes for t in tensors_in(value_of(n)))]
    if any(compat.storage_id(t) in written for t in read):
        return False
    if any(isinstance(_attribute_of(gm, n), nn.Parameter) for n in node.all_input_nodes):
        return False
    cost = find_cost(node)
    return cost is not None and cost.flops <= _CHEAP_FLOPS_PER_ELEMENT * value.numel()


def _attribute_of(gm: fx.GraphModule, node: fx.Node) -> object:
    return attribute(gm, str(node.target)) if node.op == "get_attr" else None


def _written_storages(gm: fx.GraphModule) -> set[int]:
    """Memory that some node of the graph writes, of the state of the model too."""
    by_name = {n.name: n for n in gm.graph.nodes}
    written = {
        compat.storage_id(t)
        for node in gm.graph.nodes
        for name in mutates_of(node)
        for t in tensors_in(value_of(by_name[name]))
    }
    inside = {id(attribute(gm, name)) for n in gm.graph.nodes for name in _written_inside(gm, n)}
    return written | {
        compat.storage_id(value_of(node))
        for node in gm.graph.find_nodes(op="get_attr")
        if id(attribute(gm, str(node.target))) in inside
    }


def _written_inside(gm: fx.GraphModule, node: fx.Node) -> set[str]:
    """Names of the buffers that a module writes when the node calls it."""
    if node.op != "call_module" or not updates_buffers(node):
        return set()
    module = gm.get_submodule(str(node.target))
    return {f"{node.target}.{name}" for name, _ in module.named_buffers(remove_duplicate=False)}


def placed_nodes(gm: fx.GraphModule) -> list[fx.Node]:
    """The nodes that a cut separates, in graph order."""
    free = free_nodes(gm)
    return [n for n in gm.graph.nodes if n not in free and n.op != "output"]


@dataclasses.dataclass(frozen=True)
class Bond:
    """No cut may stand before a placed node with ``first < index <= last``, or numbers change."""

    first: int
    last: int
    reason: str


def bonds(gm: fx.GraphModule) -> list[Bond]:
    """Stretches of the placed nodes that one stage must hold as a whole."""
    nodes = list(gm.graph.nodes)
    at = {n: i for i, n in enumerate(nodes)}
    found = [*_containers(nodes, at), *_written_views(nodes, at), *_written_state(gm, nodes, at)]
    placed = [at[n] for n in placed_nodes(gm)]
    return [b for b in (_on_placed(b, placed) for b in found) if b.first < b.last]


def _on_placed(bond: Bond, placed: list[int]) -> Bond:
    """The bond with graph positions turned into indices of placed nodes."""
    inside = [i for i, position in enumerate(placed) if bond.first <= position <= bond.last]
    first, last = (inside[0], inside[-1]) if inside else (0, 0)
    return Bond(first, last, bond.reason)


def _containers(nodes: list[fx.Node], at: dict[fx.Node, int]) -> Iterator[Bond]:
    for node in nodes:
        value = value_of(node) if node.op != "output" else None
        if node.users and has_tensor(value) and not isinstance(value, torch.Tensor):
            last = max(at[u] for u in node.users)
            yield Bond(at[node], last, f"%{node} is a container of tensors")


def _written_views(nodes: list[fx.Node], at: dict[fx.Node, int]) -> Iterator[Bond]:
    """Other names of a tensor that is written in place, and read after the write."""
    sharing = _sharing(nodes)
    by_name = {n.name: n for n in nodes}
    for write in nodes:
        for name in mutates_of(write):
            for storage in {compat.storage_id(t) for t in tensors_in(value_of(by_name[name]))}:
                names = [n for n in sharing[storage] if at[n] < at[write]]
                read = [n for n in names if any(at[u] >= at[write] for u in n.users)]
                last = max(
                    (at[u] for n in read for u in n.users if at[u] > at[write]), default=at[write]
                )
                # One name alone may cross before the write: the receiving stage writes its own
                # copy.
                first = at[_second_to_cross(names, read) or write]
                if any(n.op == "placeholder" for n in names):
                    # Ranks in one process share the batch: none may write what another reads.
                    first = min(
                        at[u]
                        for n in names
                        for u in n.users
                        if has_tensor(value_of(u)) or u is write
                    )
                if first == at[write] and result_is_of(write) == name and len(read) < 2:
                    continue
                yield Bond(first, last, f"%{write} writes a tensor that has other names")


def _sharing(nodes: list[fx.Node]) -> dict[int, list[fx.Node]]:
    """The nodes whose tensors live in the same memory, by that memory."""
    sharing: dict[int, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        if node.op != "output":
            for storage in {compat.storage_id(t) for t in tensors_in(value_of(node))}:
                sharing[storage].append(node)
    return sharing


def _second_to_cross(names: list[fx.Node], read: list[fx.Node]) -> fx.Node | None:
    """The first name of a tensor after which a cut would separate two that `read` needs.

    Args:
        names: nodes that share the tensor, in graph order.
        read: those of them that must be the same tensor.
    """
    made: set[fx.Node] = set()

    def crossing(node: fx.Node) -> set[fx.Node]:
        if node in made or node not in names:
            return {node} & made
        return {c for n in node.all_input_nodes for c in crossing(n)}

    for node in names:
        made.add(node)
        if len({c for r in read for c in crossing(r)}) > 1:
            return node
    return None


def _written_state(
    gm: fx.GraphModule, nodes: list[fx.Node], at: dict[fx.Node, int]
) -> Iterator[Bond]:
    """A buffer that is written lives on one stage with all that reads it, or a view of it."""
    sharing = _sharing(nodes)
    users: dict[int, set[int]] = defaultdict(set)
    names: dict[int, str] = {}
    written: set[int] = set()
    for node in nodes:
        for name in state_names(gm, node):
            key = compat.storage_id(cast(torch.Tensor, attribute(gm, name)))
            names.setdefault(key, name)
            if node.op == "get_attr":
                views = sharing[compat.storage_id(value_of(node))]
                users[key] |= {at[n] for n in views if n.op != "get_attr"}
                users[key] |= {at[u] for n in views for u in n.users}
                if any(n.name in mutates_of(u) for n in views for u in n.users):
                    written.add(key)
            else:
                users[key].add(at[node])
                if name in _written_inside(gm, node):
                    written.add(key)
    for key in written:
        yield Bond(min(users[key]), max(users[key]), f"buffer {names[key]} is written")


def cut_reasons(gm: fx.GraphModule) -> list[str | None]:
    """For each placed node, why no cut may stand before it; None where one may."""
    reasons: list[str | None] = [None] * len(placed_nodes(gm))
    for bond in bonds(gm):
        for i in range(bond.first + 1, bond.last + 1):
            reasons[i] = bond.reason
    return reasons

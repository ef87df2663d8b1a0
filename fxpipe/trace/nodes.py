"""What is known about a value, and what a node is told about its own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, fx

from fxpipe.ir import annotations as notes
from fxpipe.trace.evaluate import Outcome
from fxpipe.tree import flatten


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of a value, in the order of its leaves."""
    if isinstance(value, Tensor):
        return [value]
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]


def holds(value: Any, classes: Any) -> bool:
    """Whether a leaf of the value is of these classes; a truth value is no number here."""
    leaves = flatten(value)[0]
    if classes is bool:
        return any(isinstance(leaf, bool) for leaf in leaves)
    return any(isinstance(leaf, classes) and not isinstance(leaf, bool) for leaf in leaves)


def snapshot(leaf: Any) -> Any:
    """A tensor as it is now, without the history behind it; other leaves as they are."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().requires_grad_(leaf.requires_grad)


def annotate_effects(node: fx.Node, outcome: Outcome, named: Sequence[tuple[str, Tensor]]) -> None:
    """Notes what running the node does besides making its value.

    Args:
        node: just made.
        outcome: of its run on fakes.
        named: node name and fake of each tensor that it was given.
    """
    if outcome.mutates:
        notes.set_mutates(node, outcome.mutates)
    if outcome.writes_state:
        notes.set_updates_buffers(node, True)
    if outcome.random:
        notes.set_random(node, True)
    if isinstance(outcome.value, Tensor):
        returned = (name for name, tensor in named if tensor is outcome.value)
        notes.set_result_is(node, next(returned, None))


def erase_unread(graph: fx.Graph, unpacked: Collection[fx.Node], guarded: Collection[str]) -> None:
    """Erases unread parameters, items that were unpacked for nobody, and sizes nobody looked at.

    Args:
        graph: as it was traced.
        unpacked: nodes that the tracer made to take containers apart.
        guarded: names of nodes whose value Python was given.
    """
    for node in reversed(list(graph.nodes)):
        if node.users or node.op in ("placeholder", "output", "call_module"):
            continue
        if node.name in guarded:
            continue
        value = notes.value_of(node)
        acts = notes.mutates_of(node) or notes.updates_buffers(node) or notes.is_random(node)
        only_numbers = value is not None and not holds(value, Tensor)
        if node.op == "get_attr" or node in unpacked or (only_numbers and not acts):
            graph.erase_node(node)

"""Makes what the trace left implicit visible in the edges of the graph."""

from __future__ import annotations

import dataclasses
import operator
from typing import ClassVar

import torch
from torch import fx

from fxpipe import compat
from fxpipe.ir import verify
from fxpipe.ir.annotations import mutates_of, result_is_of, value_of
from fxpipe.ir.placement import read_instead
from fxpipe.ir.values import has_tensor
from fxpipe.manager import Pass


@dataclasses.dataclass(frozen=True)
class Normalize(Pass):
    """Lets later readers of a tensor that was written in place read the write, so that order is
    data flow.

    Unpacking moves up to what it unpacks, since a container never crosses a cut. In a graph that
    never runs backward, nodes that switch gradients on and off go: it runs without gradients.

    Rewrite::

        y = fc(%x)                         y = fc(%x)
        add_ = add_(%y, 1)        =>       add_ = add_(%y, 1)
        z = relu(%y)                       z = relu(%add_)

    Args:
        training: the graph will run backward.
    """

    name: ClassVar[str] = "normalize"
    requires: ClassVar = (verify.values_known,)

    training: bool = True

    def run(self, gm: fx.GraphModule) -> fx.GraphModule:
        if not self.training:
            for node in gm.graph.find_nodes(op="call_function", target=compat.set_grad_enabled):
                gm.graph.erase_node(node)
        _unpack_early(gm.graph)
        _read_the_write(gm.graph)
        return gm


def _unpack_early(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op in ("placeholder", "output") or isinstance(value_of(node), torch.Tensor):
            continue
        if has_tensor(value_of(node)):
            unpacking = [
                u
                for u in node.users
                if u.target is operator.getitem and not isinstance(u.args[1], fx.Node)
            ]
            for user in reversed(unpacking):
                node.append(user)


def _read_the_write(graph: fx.Graph) -> None:
    position = {n: i for i, n in enumerate(graph.nodes)}
    by_name = {n.name: n for n in graph.nodes}
    for write in graph.nodes:
        written = by_name.get(result_is_of(write) or "")
        if written is None or written.name not in mutates_of(write):
            continue
        for reader in [u for u in written.users if position[u] > position[write]]:
            read_instead(reader, written, write)

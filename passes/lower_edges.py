"""Turns boundaries into send and receive operators."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import fx

from fxpipe import ops
from fxpipe.errors import VerifyError
from fxpipe.ir import verify
from fxpipe.ir.annotations import require_stage, set_stage, set_value, value_of
from fxpipe.ir.placement import read_instead
from fxpipe.manager import Pass


@dataclasses.dataclass(frozen=True)
class LowerEdges(Pass):
    """Sends a value as soon as it exists; receives it where the boundary stood.

    The graph gains the microbatch index ``mb`` as its first input.

    Rewrite::

        stage 0                            stage 0
          a = f(%x)                          a = f(%x)
        stage 1                              send_a_1 = fxpipe::send(%a, %mb, 1, 0)
          a_on_1 = boundary(%a, 0)  =>     stage 1
          b = g(%a_on_1)                     recv_a = fxpipe::recv(%mb, [8, 16], f32, cpu, 0, 0)
                                             b = g(%recv_a)
    """

    name: ClassVar[str] = "lower-edges"
    requires: ClassVar = (verify.boundaries_inserted,)
    ensures: ClassVar = (
        verify.no_cross_stage_edges,
        verify.transfers_in_order,
        verify.sent_values_final,
    )

    def run(self, gm: fx.GraphModule) -> fx.GraphModule:
        boundaries = gm.graph.find_nodes(op="call_function", target=ops.boundary)
        index = _microbatch_index(gm)
        last_send: dict[fx.Node, fx.Node] = {}
        for boundary in boundaries:
            producer, edge = boundary.args
            target = require_stage(boundary)
            value = value_of(producer)
            if not isinstance(value, torch.Tensor):
                raise VerifyError(f"%{producer} crosses to stage {target} and is no tensor")
            with gm.graph.inserting_after(last_send.get(producer, producer)):
                sent = gm.graph.call_function(ops.send, (producer, index, target, edge))
            last_send[producer] = sent
            sent.name = f"send_{producer.name}_{target}"
            set_stage(sent, require_stage(producer))
            set_value(sent, value.new_empty(0))
            with gm.graph.inserting_before(boundary):
                shape = [int(n) for n in value.shape]
                source = require_stage(producer)
                received = gm.graph.call_function(
                    ops.recv, (index, shape, value.dtype, value.device, source, edge)
                )
            received.name = f"recv_{producer.name}_{target}"
            set_stage(received, target)
            set_value(received, value)
            for reader in list(boundary.users):
                read_instead(reader, boundary, received)
            gm.graph.erase_node(boundary)
        return gm


def _microbatch_index(gm: fx.GraphModule) -> fx.Node:
    """The placeholder ``mb``, made if the graph has none."""
    first: fx.Node = next(iter(gm.graph.nodes))
    if first.op == "placeholder" and first.target == "mb":
        return first
    with gm.graph.inserting_before(first):
        index = gm.graph.placeholder("mb")
    set_stage(index, 0)
    set_value(index, 0)
    return index

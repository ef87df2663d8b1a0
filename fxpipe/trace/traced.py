"""What a trace gives: a graph, and how a batch goes in and the user's structure comes out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import fx

from fxpipe.ir.annotations import value_of
from fxpipe.trace.guards import Guard
from fxpipe.trace.inputs import InputSpec
from fxpipe.tree import TreeSpec


@dataclass
class Traced:
    """A model as a graph.

    ``output.unflatten(module(*inputs.bind(args, kwargs)))`` equals ``model(*args, **kwargs)``, with
    the model's own parameters, buffers and leaf modules under their own names.

    Args:
        module: its output node is the flat tuple of the result's leaves, nodes and constants.
        inputs: how a batch becomes the tensors that `module` takes.
        output: the structure of the model's result.
        front_end: the way it was captured: ``"fx"`` or ``"export"``.
        guards: what Python code saw of the example's sizes. Their nodes are in `module`, where
            nothing may read them. The graph is right for batches for which all of them hold.
        why: why a better front end could not capture it; empty if the best could.
    """

    module: fx.GraphModule
    inputs: InputSpec
    output: TreeSpec
    front_end: str
    guards: tuple[Guard, ...] = ()
    why: str = ""

    @property
    def needs_gradient(self) -> tuple[bool, ...]:
        """For each leaf of the output, whether it has a gradient in the plain model."""
        (output,) = self.module.graph.find_nodes(op="output")
        leaves = cast(tuple[object, ...], output.args[0])
        return tuple(isinstance(leaf, fx.Node) and _has_gradient(leaf) for leaf in leaves)


def _has_gradient(node: fx.Node) -> bool:
    value = value_of(node)
    return isinstance(value, torch.Tensor) and value.requires_grad

"""What a trace gives: a graph, and how a batch goes in and the user's structure comes out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import fx

from fxpipe.ir.annotations import value_of
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
        front_end: the way it was captured: ``"fx"``.
        branches: the user's lines that took the way the example's sizes say. If there are any, the
            graph is known to be right only for batches of the same sizes.
    """

    module: fx.GraphModule
    inputs: InputSpec
    output: TreeSpec
    front_end: str
    branches: tuple[str, ...] = ()

    @property
    def needs_gradient(self) -> tuple[bool, ...]:
        """For each leaf of the output, whether it has a gradient in the plain model."""
        (output,) = self.module.graph.find_nodes(op="output")
        leaves = cast(tuple[object, ...], output.args[0])
        return tuple(isinstance(leaf, fx.Node) and _has_gradient(leaf) for leaf in leaves)


def _has_gradient(node: fx.Node) -> bool:
    value = value_of(node)
    return isinstance(value, torch.Tensor) and value.requires_grad

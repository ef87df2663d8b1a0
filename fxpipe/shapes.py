"""Shapes of what crosses, for any shape of the inputs, without running the model.

The graph is run once on fake tensors for each new shape of a microbatch; every rank does the same,
so no rank ever sends a shape to another.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe import compat
from fxpipe.ir.annotations import routes_of
from fxpipe.manager import share_parameters
from fxpipe.runtime.stage import Layout, TensorLayout, layout_of

log = logging.getLogger(__name__)

_KEPT = 64
"""Shapes kept; beyond, the one not used for longest goes. A shape costs some kilobytes."""


class ShapeProbe:
    """Finds the layout of every edge and the value of every size for given input shapes.

    Args:
        gm: the traced graph, before its edges are lowered.
        edges: for each edge, the name of the node it carries.
        sizes: names of the nodes without a tensor that another stage reads.
        fixed: layouts of the edges after these, which no input changes.
        training: whether gradients are on when the stages run; some kernels differ.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        edges: Sequence[str],
        sizes: Sequence[str],
        fixed: Sequence[TensorLayout] = (),
        *,
        training: bool,
    ) -> None:
        self._num_edges, self._training = len(edges), training
        self._fixed = tuple(fixed)
        self._graph = _probe_graph(gm, [*edges, *sizes])
        self._mode = compat.fake_mode()
        with self._mode:
            self._state = {n: _fake(t) for n, t in _state(self._graph)}
        self._found: OrderedDict[object, Layout] = OrderedDict()

    def layout(self, inputs: Sequence[Tensor]) -> Layout:
        """The layout of a microbatch with inputs of these shapes."""
        key = (*((tuple(t.shape), t.stride(), t.dtype) for t in inputs), _ambient_autocast())
        if key in self._found:
            self._found.move_to_end(key)
            return self._found[key]
        layout = self._propagate(inputs)
        self._found[key] = layout
        if len(self._found) > _KEPT:
            self._found.popitem(last=False)
        return layout

    def _propagate(self, inputs: Sequence[Tensor]) -> Layout:
        log.debug("shapes=%s propagated", [tuple(t.shape) for t in inputs])
        with self._mode, torch.set_grad_enabled(self._training):
            fakes = [_fake(t) for t in inputs]
            found = torch.func.functional_call(
                self._graph, self._state, tuple(fakes), tie_weights=False
            )
        edges = tuple(layout_of(value) for value in found[: self._num_edges])
        return Layout(
            edges + self._fixed, tuple(_plain(value) for value in found[self._num_edges :])
        )


def _probe_graph(gm: fx.GraphModule, names: Sequence[str]) -> fx.GraphModule:
    """The graph that returns the values of the named nodes."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node.op != "output":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    by_name = {node.name: copy for node, copy in copies.items()}
    graph.output(tuple(by_name[name] for name in names))
    return share_parameters(gm, graph)


def _state(module: nn.Module) -> list[tuple[str, Tensor]]:
    named = [*module.named_parameters(remove_duplicate=False)]
    return [*named, *module.named_buffers(remove_duplicate=False)]


def _fake(tensor: Tensor) -> Tensor:
    """A fake tensor like this one, made inside the active fake mode.

    On the CPU also where the real one has no memory yet: a meta parameter meets real inputs.
    """
    device = "cpu" if tensor.is_meta else tensor.device
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake


def _ambient_autocast() -> Hashable:
    """What the caller's own ``torch.autocast`` around a step makes of dtypes."""
    return tuple(
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in ("cpu", "cuda")
    )


def _plain(value: Any) -> Any:
    """A size as Python holds it."""
    return tuple(value) if isinstance(value, torch.Size) else value


def edge_names(gm: fx.GraphModule) -> list[str]:
    """For each edge of a routed graph, by index, the name of the node it carries."""
    named = {route.edge: node.name for node in gm.graph.nodes for route in routes_of(node)}
    return [named[edge] for edge in sorted(named)]

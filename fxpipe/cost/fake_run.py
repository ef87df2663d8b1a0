"""Runs single nodes of a graph on fake values, to count their FLOPs and to see what they return."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from fxpipe import compat
from fxpipe.cost.formulas import BY_FUNCTION
from fxpipe.ir.annotations import mutates_of, value_of
from fxpipe.ir.values import tensors_in

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Run:
    """What one run of a node told.

    Args:
        flops: of the forward; 0 if the node cannot be run on fake values.
        grad: whether a gradient flows through the result.
        view: whether the result is memory of the arguments, untouched.
    """

    flops: int
    grad: bool
    view: bool


class FakeRunner:
    """Runs nodes in graph order, and knows through which of them a gradient flows.

    Args:
        gm: the graph the nodes are of.
        mode: the fake tensor mode of its values; must be active, and gradients enabled.
        counter: active inside `mode`.
    """

    def __init__(self, gm: fx.GraphModule, mode: Any, counter: FlopCounterMode) -> None:
        self.gm, self.mode, self.counter = gm, mode, counter
        self.grad: dict[fx.Node, bool] = {}
        self.runs: dict[object, Run] = {}
        self.regions: dict[fx.Node, Any] = {}  # what the nodes that open a region returned

    def start(self, node: fx.Node) -> bool:
        """Takes note of an input, parameter or buffer; returns whether it wants a gradient."""
        # of a parameter the real one knows: a trace without gradients has fakes without them
        value = self.attribute(node) if node.op == "get_attr" else value_of(node)
        self.grad[node] = any(t.requires_grad for t in tensors_in(value))
        return self.grad[node]

    def switch_region(self, node: fx.Node) -> None:
        """Opens or closes an autocast or gradient region for the nodes after it."""
        assert callable(node.target)
        args = fx.node.map_arg(node.args, lambda n: self.regions[n])
        self.regions[node] = node.target(*args)
        self.grad[node] = False

    def run(self, node: fx.Node) -> Run:
        """What a call node does; nodes that do the same run once."""
        key = self._key(node)
        if key not in self.runs:
            self.runs[key] = self._run(node)
        run = self.runs[key]
        self.grad[node] = run.grad
        for n in node.all_input_nodes:
            if n.name in mutates_of(node):
                self.grad[n] |= run.grad
        return run

    def attribute(self, node: fx.Node) -> object:
        """The parameter, buffer or other attribute that a ``get_attr`` node stands for."""
        path, _, name = str(node.target).rpartition(".")
        return getattr(self.gm.get_submodule(path), name)

    def module(self, node: fx.Node) -> nn.Module | None:
        """The module that a node calls, if it calls one."""
        return self.gm.get_submodule(str(node.target)) if node.op == "call_module" else None

    def parameters(self, node: fx.Node) -> list[nn.Parameter]:
        """Parameters that a call node reads: its arguments, and those of the module it calls."""
        read = [self.attribute(n) for n in node.all_input_nodes if n.op == "get_attr"]
        module = self.module(node)
        held = [] if module is None else list(module.parameters())
        return [p for p in [*read, *held] if isinstance(p, nn.Parameter)]

    def _key(self, node: fx.Node) -> object:
        """Nodes with equal keys do the same; the node itself where that cannot be told."""
        module = self.module(node)
        if module is not None and not type(module).__module__.startswith("torch.nn."):
            return node
        values = [value_of(n) for n in node.all_input_nodes]
        if any(not isinstance(v, Tensor) and any(True for _ in tensors_in(v)) for v in values):
            return node
        called: object = node.target
        if module is not None:
            held = [_signature(p, p.requires_grad) for p in module.parameters()]
            called = (type(module), repr(module), module.training, tuple(held))
        described = fx.node.map_arg((node.args, node.kwargs), self._describe)
        device = next((t.device.type for v in values for t in tensors_in(v)), "cpu")
        autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        return node.op, called, repr(described), torch.is_grad_enabled(), autocast

    def _describe(self, node: fx.Node) -> Any:
        value = value_of(node)
        return _signature(value, self.grad[node]) if isinstance(value, Tensor) else value

    def _run(self, node: fx.Node) -> Run:
        inputs = node.all_input_nodes
        grad = any(self.grad[n] for n in inputs) or any(
            p.requires_grad for p in self.parameters(node)
        )
        if formula := BY_FUNCTION.get(name_of_call(node)):
            return Run(formula(*(tuple(value_of(n).shape) for n in inputs)), grad, view=False)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: self._argument(n, node))
        given = list(tensors_in([args, kwargs]))
        before, versions = self.counter.get_total_flops(), [t._version for t in given]
        try:
            made = list(tensors_in(self._call(node, args, kwargs)))
        # user code may raise anything on fake values; its bytes are known, and that will do
        except Exception as error:
            log.debug("node=%s target=%s flops=unknown error=%r", node, node.target, error)
            return Run(0, grad, view=False)
        written = versions != [t._version for t in given]
        memory = {compat.storage_id(t) for t in given}
        return Run(
            flops=self.counter.get_total_flops() - before,
            grad=any(t.requires_grad for t in made),
            view=not written and all(compat.storage_id(t) in memory for t in made),
        )

    def _call(self, node: fx.Node, args: Any, kwargs: Any) -> object:
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        module = self.module(node)
        if module is None:
            assert callable(node.target)
            return node.target(*args, **kwargs)
        tensors = [*module.named_parameters(), *module.named_buffers()]
        state = {name: self.mode.from_tensor(t) for name, t in tensors}
        # a copy, so that what forward assigns to `self` does not reach the user's module
        return torch.func.functional_call(compat.share_module(module), state, args, kwargs)

    def _argument(self, node: fx.Node, reader: fx.Node) -> Any:
        """The value of an argument, without the history of the trace."""

        def fresh(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            tensor = value.detach()
            tensor = tensor.requires_grad_(self.grad[node] and can_have_gradient(tensor))
            # autograd lets no leaf be written
            return tensor.clone() if node.name in mutates_of(reader) else tensor

        value = value_of(node)
        # map_aggregate would turn other containers into plain ones
        plain = isinstance(value, Tensor) or type(value) in (tuple, list, dict)
        return fx.node.map_aggregate(value, fresh) if plain else value


def name_of_call(node: fx.Node) -> str:
    """Name of the function, method or class that a call node calls."""
    if node.op == "call_module":
        assert node.graph.owning_module is not None
        return type(node.graph.owning_module.get_submodule(str(node.target))).__name__
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.partition(".")[0]  # an operator of ATen is named with its overload


def can_have_gradient(tensor: Tensor) -> bool:
    """Whether the dtype of the tensor allows a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


def _signature(tensor: Tensor, grad: bool) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, grad

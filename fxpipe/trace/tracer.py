"""An fx tracer whose proxies carry fake values, so that Python may look at shapes and dtypes.

Plain ``symbolic_trace`` takes almost none of Hugging Face's models: their forwards unpack shapes,
compare dtypes and loop over sizes, which needs values behind the proxies. Sizes stay nodes where
the code only computes with them, so the graph is right at other sizes too.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe import compat
from fxpipe.ir import annotations as notes
from fxpipe.trace.assignments import Assignments
from fxpipe.trace.evaluate import Evaluator, Outcome
from fxpipe.trace.fold import Folder, Unknown
from fxpipe.trace.guards import Guard, plain_value
from fxpipe.trace.inputs import BoundInputs, InputBinder, Placeholder, paths_of, placeholder_names
from fxpipe.trace.nodes import annotate_effects, erase_unread, holds, snapshot, tensors_of
from fxpipe.trace.proxies import UntraceableError, ValueProxy, map_values, proxies_in
from fxpipe.trace.regions import Regions, regions_recorded
from fxpipe.trace.source import current_line
from fxpipe.trace.state import FakeState
from fxpipe.trace.torch_calls import (
    CONSTANTS,
    TorchCalls,
    factories_take_proxies,
    recorded,
    worth_a_node,
)
from fxpipe.trace.type_checks import type_checks_see_values
from fxpipe.tree import Field, TreeSpec, flatten, open_container

# torch.nn classes that are containers of layers: to keep one whole would leave nothing to cut
_OPENED = (nn.Sequential, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)

_NUMBERS = (int, float, complex, torch.Size)

# part of the number of dimensions and the dtype, for which a graph is made anyhow
_FIXED = frozenset({"ndim", "dim", "ndimension", "itemsize", "element_size"})

# truth values about a tensor that depend on its sizes or strides
_ASKS_SIZES = frozenset({"is_contiguous", "is_same_size"})


class ValueTracer(fx.Tracer):
    """Traces one model, once.

    Args:
        model: its state is out of reach while it is traced, see `FakeState`.
        device: the device to trace on, that of the inputs.
        leaves: FQNs and classes of modules to keep as one node, besides torch's own.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, leaves: Sequence[str | type[nn.Module]]
    ) -> None:
        super().__init__()
        self.model, self.device = model, device
        self.busy = 0
        self.guards: dict[str, Guard] = {}  # by node, in order
        self.output: TreeSpec | None = None
        self.placeholders: tuple[Placeholder, ...] = ()
        self.unpacked: set[fx.Node] = set()
        self._leaf_names = {leaf for leaf in leaves if isinstance(leaf, str)}
        self._leaf_types = tuple(leaf for leaf in leaves if not isinstance(leaf, str))
        self._mode = compat.fake_mode()
        self.state = FakeState(model, self._mode, device)
        self._evaluate = Evaluator(self._mode, self.state)
        self._attributes: dict[str, ValueProxy] = {}
        self.assignments = Assignments(self)
        self._regions = Regions()
        self._folder = Folder()

    def capture(
        self,
        binder: InputBinder,
        bound: BoundInputs,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> fx.Graph:
        """The graph of ``model(*args, **kwargs)``, whose state must be installed."""
        self.arguments = (binder, bound, args, kwargs)
        with (
            torch.enable_grad(),
            type_checks_see_values(self.model),
            factories_take_proxies(),
            compat.wrapped_functions_made_by(recorded),
            regions_recorded(self),
            self.assignments.watched(),
            TorchCalls(self),
        ):
            graph = self.trace(self.model)
        erase_unread(graph, self.unpacked, self.guards)
        compat.forget_tracer(graph)
        return graph

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """Lets fx call the model itself, so that hooks and an overridden forward run."""
        return self.run_model, []

    def run_model(self) -> tuple[Any, ...]:
        """Calls the model on proxies. Returns the leaves of its result."""
        binder, bound, args, kwargs = self.arguments
        arguments = bound.structure.unflatten(self.make_placeholders(bound))
        args, kwargs = binder.call_form(arguments, args, kwargs)
        result = self.model(*args, **kwargs)
        self.assignments.write_back()
        leaves, self.output = flatten(result)
        return tuple(map(output_leaf, leaves))

    def make_placeholders(self, bound: BoundInputs) -> list[Any]:
        """The leaves of the batch, with a proxy for each tensor."""
        values, made = [], []
        names, paths = placeholder_names(bound.structure), paths_of(bound.structure)
        for leaf, (parameter, name), path in zip(bound.leaves, names, paths, strict=True):
            if not isinstance(leaf, Tensor):
                values.append(leaf)
                continue
            node = self.create_node("placeholder", name, (), {}, name=name)
            node.target = node.name  # unique, also where two paths spell the same name
            with self.quiet():
                fake = self.state.input_fake(leaf)
            self._annotate_value(node, fake)
            made.append(Placeholder(node.name, parameter, path))
            values.append(ValueProxy(node, self, fake))
        self.placeholders = tuple(made)
        return values

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if not module_qualified_name:
            return False
        if module_qualified_name in self._leaf_names or isinstance(m, self._leaf_types):
            return True
        return not isinstance(m, _OPENED) and super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        # a module made on the fly has no name a node could call
        if self.busy or m not in self.submodule_paths:  # type: ignore[operator]
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if self.busy or not isinstance(attr_val, Tensor) or self.state.name_of(attr_val) is None:
            return attr_val
        return self.attribute(attr_val)

    def create_proxy(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
        type_expr: Any = None,
        proxy_factory_fn: Any = None,
    ) -> Any:
        return self.record(kind, target, args, kwargs, name)

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any
    ) -> fx.Node:
        node = super().create_node(kind, target, args, kwargs, *rest, **named)
        node.meta.pop("nn_module_stack", None)
        if kind == "output":
            notes.set_value(node, map_values(_value_of_argument, args[0]))
            return node
        source, path = self.place()
        notes.set_source(node, source)
        notes.set_module_path(node, path)
        if (region := self.current_region) is not None:
            notes.set_checkpoint_region(node, region)
        return node

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, ValueProxy):
            return a.node
        if isinstance(a, Tensor):
            return self.attribute(a).node
        if type(a).__module__ == "numpy" and getattr(a, "ndim", None) == 0:
            a = a.item()  # generated code knows no numpy
        made = super().create_arg(a)
        if isinstance(made, fx.Node) and notes.value_of(made) is None:
            notes.set_value(made, map_values(self._fake_of, a))  # a dataclass or a named tuple
        return made

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """While inside, nothing is recorded: code runs on fakes."""
        self.busy += 1
        try:
            yield
        finally:
            self.busy -= 1

    @property
    def current_region(self) -> int | None:
        """Number of the activation checkpoint region that nodes are made in."""
        return self._regions.current

    def checkpoint_region(self) -> contextlib.AbstractContextManager[None]:
        """Marks the nodes made inside as one activation checkpoint region."""
        return self._regions.opened()

    def place(self) -> tuple[str, tuple[tuple[str, str], ...]]:
        """The user's line that runs, and the modules it runs in, outermost first."""
        path = tuple((fqn, cls.__name__) for fqn, cls in self.module_stack.values())
        return current_line(ValueTracer.run_model.__code__), path

    def guard(self, node: fx.Node, value: Any) -> None:
        """Notes that Python was given this value of the node, which the example's sizes made."""
        if node.name not in self.guards:
            self.guards[node.name] = Guard(node.name, plain_value(value), self.place()[0])

    def guard_length(self, proxy: ValueProxy) -> None:
        """Notes that Python was given the length of a tensor."""
        length = self.record("call_method", "size", (proxy, 0), {})
        if isinstance(length, ValueProxy):
            self.guard(length.node, length.value)

    def known(self, proxy: ValueProxy) -> Any:
        """What the proxy stands for if sizes alone decide it, else None."""
        if not isinstance(proxy.value, Tensor):
            return proxy.value
        try:
            with self.quiet():
                return self._folder.value(proxy.node)
        except Unknown:
            return None

    def record_region(self, target: Callable[..., Any], args: tuple[Any, ...]) -> fx.Node:
        """A node that opens or closes a region; it has no value."""
        return self.create_node("call_function", target, args, {})

    def record_torch_call(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Records a torch call of the model's code, or runs it where it makes a constant."""
        if func is compat.set_grad_enabled:
            self.record_region(func, args)
            return func(*args)
        if not proxies_in((args, kwargs)) and not worth_a_node(func, args, kwargs, self.state):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if torch.overrides.is_tensor_method_or_property(func):
            return self.record("call_method", name, args, kwargs)
        return self.record("call_function", func, args, kwargs, name=_node_name(name))

    def record(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
    ) -> Any:
        """Runs a call on fakes and makes its node; returns what Python gets to see.

        That is a proxy, or a container of proxies, or the plain value where no node is needed.
        """
        found = proxies_in((args, kwargs))
        named = self._named_tensors(found, (args, kwargs))
        if target in ("item", "tolist") and (known := self.known(args[0])) is not None:
            self.guard(args[0].node, known)
            return getattr(known, target)()
        outcome = self._run(kind, target, args, kwargs, named)
        attribute = args[1] if target is getattr else target
        is_truth = outcome.pure and _is_truth_of_sizes(attribute, outcome.value, found)
        if outcome.pure and not (is_truth or _needs_node(attribute, outcome.value, found)):
            return outcome.value
        node = self.create_node(
            kind, target, self.create_arg(args), self.create_arg(kwargs), name=name
        )
        self._annotate_value(node, outcome.value)
        annotate_effects(node, outcome, named)
        if is_truth:
            self.guard(node, outcome.value)
        if is_truth or outcome.value is None:
            return outcome.value
        return self._spread(ValueProxy(node, self, outcome.value))

    def _run(
        self, kind: str, target: Any, args: Any, kwargs: Any, named: list[tuple[str, Tensor]]
    ) -> Outcome:
        fake_args = map_values(self._fake_of, tuple(args))
        fake_kwargs = map_values(self._fake_of, dict(kwargs))
        with self.quiet():
            if kind == "call_method":
                method = getattr(fake_args[0], target)
                return self._evaluate(method, fake_args[1:], fake_kwargs, named)
            function = self.model.get_submodule(target) if kind == "call_module" else target
            try:
                return self._evaluate(function, fake_args, fake_kwargs, named)
            except UntraceableError:
                if function is not compat.assert_:
                    raise
                return Outcome(None, (), False, False)  # checked when the graph runs

    def _named_tensors(
        self, found: Sequence[ValueProxy], arguments: Any
    ) -> list[tuple[str, Tensor]]:
        """Node name and fake of each tensor that a call is given, also of the model's own."""
        own = [self.attribute(x) for x in flatten(arguments)[0] if isinstance(x, Tensor)]
        return [(p.node.name, t) for p in (*found, *own) for t in tensors_of(p.value)]

    def _annotate_value(self, node: fx.Node, value: Any) -> None:
        # detached: as it is now, and without the history of the whole model behind it
        with self.quiet(), self._mode:
            notes.set_value(node, map_values(snapshot, value))

    def _spread(self, proxy: ValueProxy) -> Any:
        """A container's proxy as a real container of proxies; others as they are."""
        if isinstance(proxy.value, (Tensor, *_NUMBERS)):
            return proxy
        opened = open_container(proxy.value)
        if opened is None:
            return proxy
        children = []
        for step, child in zip(opened.steps, opened.children, strict=True):
            if not holds(child, (Tensor, *_NUMBERS)):
                children.append(child)
                continue
            access = getattr if isinstance(step, Field) else operator.getitem
            node = self.create_node("call_function", access, (proxy.node, step[0]), {})
            self._annotate_value(node, child)
            self.unpacked.add(node)
            children.append(self._spread(ValueProxy(node, self, child)))
        return opened.rebuild(children)

    def attribute(self, tensor: Tensor) -> ValueProxy:
        """The proxy of a tensor of the model, or of a constant that its code made."""
        name = self.state.name_of(tensor)
        if name is None:
            if isinstance(tensor, nn.Parameter):
                raise UntraceableError(
                    "reads a parameter that is not registered in the model",
                    "register it with the module that uses it",
                )
            with self.quiet():
                name = self.state.lift(tensor)
        assigned = self.assignments.values.get(name)
        return assigned if assigned is not None else self.read_attribute(name)

    def read_attribute(self, name: str) -> ValueProxy:
        """The proxy of what the model holds under this name."""
        if name not in self._attributes:
            node = self.create_node("get_attr", name, (), {})
            fake = self.state.named(name)
            self._annotate_value(node, fake)
            self._attributes[name] = ValueProxy(node, self, fake)
        return self._attributes[name]

    def _fake_of(self, leaf: Any) -> Any:
        if isinstance(leaf, ValueProxy):
            return leaf.value
        return self.attribute(leaf).value if isinstance(leaf, Tensor) else leaf


def output_leaf(leaf: Any) -> Any:
    """A leaf of the model's result, if a graph can return it.

    Raises:
        UntraceableError: it cannot.
    """
    if isinstance(leaf, (*CONSTANTS, Tensor, ValueProxy, torch.Size)):
        return leaf
    name = type(leaf).__name__
    cache = "pass use_cache=False, or " if name.endswith("Cache") else ""
    raise UntraceableError(
        f"returns a {name}, which is neither a tensor, a constant nor a known container",
        f"{cache}return tensors in lists, dicts, tuples or dataclasses",
    )


def _needs_node(target: Any, value: Any, found: Sequence[ValueProxy]) -> bool:
    """Whether a result without effects is part of the graph; if not, it is what it is."""
    if value is None:
        return target not in ("grad", "grad_fn")
    if holds(value, Tensor):
        return True
    fixed = target in _FIXED or _of_attributes(found)
    return holds(value, _NUMBERS) and not fixed


def _is_truth_of_sizes(target: Any, value: Any, found: Sequence[ValueProxy]) -> bool:
    """Whether a result is a truth value that other sizes might change."""
    if not isinstance(value, bool) or _of_attributes(found):
        return False
    return target in _ASKS_SIZES or any(not isinstance(p.value, Tensor) for p in found)


def _of_attributes(found: Sequence[ValueProxy]) -> bool:
    """Whether a call is given parameters and buffers alone, whose sizes never change."""
    return all(proxy.node.op == "get_attr" for proxy in found)


def _node_name(function_name: str) -> str | None:
    return function_name.strip("_") or None


def _value_of_argument(leaf: Any) -> Any:
    return notes.value_of(leaf) if isinstance(leaf, fx.Node) else leaf

"""Proxies that know the fake value they stand for, so that Python code can look at it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx

from fxpipe.tree import open_container

if TYPE_CHECKING:
    from fxpipe.trace.tracer import ValueTracer


class UntraceableError(Exception):
    """The model's code does what a graph cannot hold.

    Args:
        problem: a predicate whose subject is the module: ``branches on the value of a tensor``.
        hint: the way out; empty for the usual one, to make the module a leaf.
    """

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.problem, self.hint = problem, hint


class ValueProxy(fx.Proxy):
    """Stands for the result of a node; Python sees the shape, type and size of `value`.

    Numbers and sizes stay nodes as long as code computes with them. Where Python needs the number
    itself (a branch, ``range``, a list index) it gets the example's, and the tracer notes the line.
    """

    tracer: ValueTracer

    def __init__(self, node: fx.Node, tracer: ValueTracer, value: Any) -> None:
        vars(self).update(node=node, tracer=tracer, value=value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        with self.tracer.quiet():
            found = getattr(self.value, name)  # an AttributeError is the right answer
        if callable(found):
            return AttributeProxy(self, name, found)
        return self.tracer.record("call_function", getattr, (self, name), {})

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "requires_grad" and isinstance(self.value, Tensor):
            self.tracer.record("call_method", "requires_grad_", (self, value), {})
        elif name in ("data", "grad"):
            raise UntraceableError(f"assigns .{name} of a tensor in its forward")
        else:
            vars(self)[name] = value  # a mark of the user's, read back from here

    def concrete(self, what: str) -> Any:
        """The Python value itself.

        Raises:
            UntraceableError: it is a tensor's, which only a run knows.
        """
        value = self.value
        if isinstance(value, Tensor):
            value = self.tracer.known(self)
            if value is None:
                raise UntraceableError(f"{what} the value of a tensor")
        self.tracer.guard(self.node, value)
        return value

    def __bool__(self) -> bool:
        return bool(self.concrete("branches on"))

    def __int__(self) -> int:
        return int(self._rounded("makes an int of", int))

    def __float__(self) -> float:
        return float(self.concrete("makes a float of"))

    def __complex__(self) -> complex:
        return complex(self.concrete("makes a complex of"))

    def __index__(self) -> int:
        return operator.index(self.concrete("makes an index of"))

    def __round__(self, digits: int | None = None) -> Any:
        return self._rounded("rounds", round, digits)

    def _rounded(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        """What Python is given of a number, which is the same for many numbers."""
        if isinstance(self.value, Tensor):
            return function(self.concrete(what), *args)
        made = self.tracer.record("call_function", function, (self, *args), {})
        return made.concrete(what) if isinstance(made, ValueProxy) else made

    def __hash__(self) -> int:
        # a size must find itself in a dictionary; a tensor hashes by identity, as in eager code
        return id(self) if isinstance(self.value, Tensor) else hash(self.concrete("hashes"))

    def __len__(self) -> int:
        if isinstance(self.value, Tensor):
            self.tracer.guard_length(self)
        return len(self.value)

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.value, Tensor):
            self.tracer.guard_length(self)
        items = range(len(self.value))
        return iter(
            [self.tracer.record("call_function", operator.getitem, (self, i), {}) for i in items]
        )

    def __contains__(self, item: object) -> bool:
        return item in self.concrete("looks into")

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.record("call_function", operator.setitem, (self, key, value), {})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{type(self.value).__name__!r} object is not callable")

    def keys(self) -> Any:
        return self.value.keys()

    @classmethod
    def __torch_function__(
        cls, orig_method: Any, types: Any, args: Any = None, kwargs: Any = None
    ) -> Any:
        """Reached where the tracer's function mode is off: inside the mode's own handler."""
        args, kwargs = args or (), kwargs or {}
        found = proxies_in((args, kwargs))
        return found[0].tracer.record_torch_call(orig_method, args, kwargs)


class AttributeProxy(ValueProxy):
    """A method of a traced value, not yet called; becomes a node of its own only if it never is."""

    def __init__(self, root: ValueProxy, attr: str, value: Any) -> None:
        vars(self).update(root=root, attr=attr, tracer=root.tracer, value=value, held=None)

    @property
    def node(self) -> fx.Node:  # type: ignore[override]
        if self.held is None:
            made = self.tracer.record("call_function", getattr, (self.root, self.attr), {})
            vars(self)["held"] = made.node
        held: fx.Node = self.held
        return held

    def concrete(self, what: str) -> Any:
        return self.value  # a method is the same for all sizes

    def __hash__(self) -> int:
        return id(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tracer.record("call_method", self.attr, (self.root, *args), kwargs)


def _in_place(name: str) -> Callable[[ValueProxy, Any], Any]:
    in_place, plain = getattr(operator, name), getattr(operator, f"__{name[1:]}__")

    def method(self: ValueProxy, other: Any) -> Any:
        # x += y writes into a tensor, and whoever else holds x sees it; fx would record x + y
        target = in_place if isinstance(self.value, Tensor) else plain
        return self.tracer.record("call_function", target, (self, other), {})

    return method


for _name in [
    "iadd",
    "isub",
    "imul",
    "itruediv",
    "ifloordiv",
    "imod",
    "ipow",
    "iand",
    "ior",
    "ixor",
    "ilshift",
    "irshift",
]:
    setattr(ValueProxy, f"__{_name}__", _in_place(_name))


def map_values(function: Callable[[Any], Any], value: Any) -> Any:
    """A call's arguments with `function` applied to every leaf, in containers and slices too."""
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return slice(*(map_values(function, part) for part in parts))
    if type(value) in (tuple, list):
        return type(value)([map_values(function, item) for item in value])
    if type(value) is dict:
        return {key: map_values(function, item) for key, item in value.items()}
    opened = open_container(value)
    if opened is None:
        return function(value)
    return opened.rebuild([map_values(function, child) for child in opened.children])


def proxies_in(value: Any) -> list[ValueProxy]:
    """The proxies anywhere in a call's arguments."""
    found: list[ValueProxy] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[ValueProxy]) -> None:
    if isinstance(value, ValueProxy):
        found.append(value)
    elif type(value) in (tuple, list):
        for item in value:
            _collect(item, found)
    elif isinstance(value, slice):
        _collect((value.start, value.stop, value.step), found)
    elif (opened := open_container(value)) is not None:
        _collect(opened.children, found)

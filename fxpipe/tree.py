"""Takes nested containers apart into a flat list of leaves and a structure that puts them together.

Terms:
    leaf: whatever is not a container known here: tensors, numbers, None, strings, objects.
    step: how a child is reached from its container, `Item` or `Field`.

Containers are list, tuple, named tuples, ``torch.return_types``, mappings that can be built from
a dict, dataclasses, and every class registered with torch's pytree. Unlike torch's pytree,
dataclasses need no registration, a mapping keeps its class and the order of its keys, and
structures compare and hash whatever their keys are.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fxpipe.compat import registered_container


class Item(NamedTuple):
    """The child ``container[key]``."""

    key: Any


class Field(NamedTuple):
    """The child ``container.name``."""

    name: str


Step = Item | Field

Rebuild = Callable[[list[Any]], Any]
"""Makes a container like the one taken apart, of new children."""


class Opened(NamedTuple):
    """A container taken apart, one level deep."""

    steps: tuple[Step, ...]
    children: list[Any]
    context: Any  # what besides the children makes the container
    rebuild: Rebuild


class TreeSpec:
    """The structure of a value whose leaves were taken out. Compares, hashes and prints.

    ``str`` draws leaves as stars:

    >>> spec = flatten({"loss": 1.0, "parts": [2, (3, None)]})[1]
    >>> print(spec)
    {'loss': *, 'parts': [*, (*, *)]}
    """

    __slots__ = ("_frozen", "_hash", "_rebuild", "children", "num_leaves", "steps", "type")

    def __init__(
        self,
        type_: type | None,
        steps: tuple[Step, ...] = (),
        children: tuple[TreeSpec, ...] = (),
        frozen: Hashable = None,
        rebuild: Rebuild | None = None,
    ) -> None:
        self.type = type_
        self.steps = steps
        self.children = children
        self.num_leaves: int = sum(c.num_leaves for c in children) if type_ is not None else 1
        self._frozen = frozen
        self._rebuild = rebuild
        self._hash: int | None = None

    @property
    def is_leaf(self) -> bool:
        return self.type is None

    def unflatten(self, leaves: Iterable[Any]) -> Any:
        """The value with these leaves, in the order in which `flatten` gave them.

        Raises:
            ValueError: there are fewer or more leaves than the structure has places.
        """
        held = list(leaves)
        if len(held) != self.num_leaves:
            raise ValueError(f"{self} has {self.num_leaves} leaves, {len(held)} were given")
        return self._take(iter(held))

    def _take(self, leaves: Iterator[Any]) -> Any:
        if self._rebuild is None:
            return next(leaves)
        return self._rebuild([child._take(leaves) for child in self.children])

    def paths(self) -> list[tuple[Step, ...]]:
        """The steps that lead to each leaf."""
        if self.is_leaf:
            return [()]
        return [
            (step, *rest)
            for step, child in zip(self.steps, self.children, strict=True)
            for rest in child.paths()
        ]

    def names(self, root: str = "") -> list[str]:
        """Each leaf's path as the user would write it: ``batch['ids'][0].mask``."""
        return [root + "".join(_written(step) for step in path) for path in self.paths()]

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, TreeSpec):
            return NotImplemented
        return (
            self.type is other.type
            and self._frozen == other._frozen
            and self.steps == other.steps
            and self.children == other.children
        )

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((self.type, self._frozen, self.children))
        return self._hash

    def __repr__(self) -> str:
        if self.type is None:
            return "*"
        if self.type is list:
            return f"[{', '.join(map(repr, self.children))}]"
        if self.type is tuple:
            comma = "," if len(self.children) == 1 else ""
            return f"({', '.join(map(repr, self.children))}{comma})"
        entries = zip(self.steps, self.children, strict=True)
        if self.type is dict:
            return f"{{{', '.join(f'{step[0]!r}: {child!r}' for step, child in entries)}}}"
        return (
            f"{self.type.__name__}({', '.join(f'{step[0]}={child!r}' for step, child in entries)})"
        )


_LEAF = TreeSpec(None)


def flatten(value: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of a value, depth first, and its structure.

    >>> leaves, spec = flatten({"a": 1, "b": [2, 3]})
    >>> leaves
    [1, 2, 3]
    >>> spec.unflatten([10, 20, 30])
    {'a': 10, 'b': [20, 30]}
    >>> spec.names("batch")
    ["batch['a']", "batch['b'][0]", "batch['b'][1]"]
    """
    leaves: list[Any] = []
    return leaves, _flatten_into(value, leaves)


def _flatten_into(value: Any, leaves: list[Any]) -> TreeSpec:
    opened = None if type(value) in _PLAIN_LEAVES else open_container(value)
    if opened is None:
        leaves.append(value)
        return _LEAF
    children = tuple(_flatten_into(child, leaves) for child in opened.children)
    return TreeSpec(type(value), opened.steps, children, _frozen(opened.context), opened.rebuild)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """The value with `function` applied to each leaf."""
    leaves, spec = flatten(value)
    return spec.unflatten([function(leaf) for leaf in leaves])


def open_container(value: Any) -> Opened | None:
    """Takes a container apart, one level deep; None for a leaf."""
    cls = type(value)
    if cls in _PLAIN_LEAVES:
        return None
    if cls is list or cls is tuple:
        steps = tuple(Item(i) for i in range(len(value)))
        return Opened(steps, list(value), None, list if cls is list else tuple)
    if cls is dict:
        return _open_mapping(value, lambda entries: entries)
    if isinstance(value, (torch.nn.Module, type)):
        return None
    if isinstance(value, collections.defaultdict):
        factory = value.default_factory
        return _open_mapping(value, lambda entries: cls(factory, entries), factory)
    if (registered := registered_container(cls)) is not None:
        return _open_registered(value, *registered)
    if isinstance(value, tuple):
        return _open_tuple(value)
    if isinstance(value, Mapping):
        return _open_foreign_mapping(value)
    if dataclasses.is_dataclass(value):
        return _open_dataclass(value)
    return None


# The common leaves, and a tuple subclass that torch treats as a number.
_PLAIN_LEAVES = frozenset(
    {torch.Tensor, torch.nn.Parameter, torch.Size, type(None), bool, int, float, complex, str}
)


def _open_tuple(value: tuple[Any, ...]) -> Opened | None:
    cls = type(value)
    if (names := getattr(cls, "_fields", None)) is not None:
        fields = tuple(Field(name) for name in names)
        return Opened(fields, list(value), None, lambda children: cls(*children))
    if hasattr(cls, "n_sequence_fields"):  # torch.return_types
        return Opened(tuple(Item(i) for i in range(len(value))), list(value), None, cls)
    return None


def _open_mapping(
    value: Mapping[Any, Any], build: Callable[[dict[Any, Any]], Any], context: Any = None
) -> Opened:
    keys = tuple(value)
    return Opened(
        tuple(Item(key) for key in keys),
        [value[key] for key in keys],
        context,
        lambda children: build(dict(zip(keys, children, strict=True))),
    )


def _open_foreign_mapping(value: Mapping[Any, Any]) -> Opened | None:
    cls: Callable[[dict[Any, Any]], Any] = type(value)
    by_keyword = dataclasses.is_dataclass(value)
    build = (lambda entries: cls(**entries)) if by_keyword else cls  # type: ignore[call-arg]
    try:
        build(dict(value))
    except (TypeError, ValueError):
        return None  # its constructor takes something else: a leaf
    return _open_mapping(value, build)


def _open_registered(
    value: Any,
    flatten_one: Callable[[Any], tuple[Iterable[Any], Any]],
    unflatten_one: Callable[[Iterable[Any], Any], Any],
) -> Opened:
    parts, context = flatten_one(value)
    children = list(parts)
    return Opened(
        _registered_steps(value, children),
        children,
        context,
        lambda new: unflatten_one(new, context),
    )


def _registered_steps(value: Any, children: Sequence[Any]) -> tuple[Step, ...]:
    if isinstance(value, Mapping) and len(value) == len(children):
        return tuple(Item(key) for key in value)
    names = [n for n in getattr(value, "__dict__", ()) if not n.startswith("_")]
    held = [getattr(value, name) for name in names]
    if len(held) == len(children) and all(h is c for h, c in zip(held, children, strict=True)):
        return tuple(Field(name) for name in names)
    return tuple(Item(i) for i in range(len(children)))


def _open_dataclass(value: Any) -> Opened:
    cls = type(value)
    names = tuple(f.name for f in dataclasses.fields(value) if hasattr(value, f.name))

    def rebuild(children: list[Any]) -> Any:
        # past __init__ and __post_init__, which may check or convert what is not there yet
        made = object.__new__(cls)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(made, name, child)
        return made

    return Opened(
        tuple(Field(name) for name in names), [getattr(value, n) for n in names], None, rebuild
    )


def _frozen(context: Any) -> Hashable:
    """The context of a container as something that compares and hashes."""
    if isinstance(context, (list, tuple)):
        return (type(context), tuple(_frozen(c) for c in context))
    if isinstance(context, Mapping):
        return (type(context), tuple((key, _frozen(c)) for key, c in context.items()))
    try:
        hash(context)
    except TypeError:
        return (type(context), repr(context))
    hashable: Hashable = context
    return hashable


def _written(step: Step) -> str:
    return f".{step.name}" if isinstance(step, Field) else f"[{step.key!r}]"

"""Binds what a caller passes to a model to the placeholders of its graph.

Terms:
    bound arguments: forward's parameters with what was passed or their defaults.
    placeholder: one tensor leaf of the bound arguments. Other leaves are constants of the trace.
    key: hashable; two batches with equal keys can run through the same graph.
"""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fxpipe.errors import InputError
from fxpipe.tree import Step, TreeSpec, flatten


class BoundInputs(NamedTuple):
    """A batch, taken apart."""

    leaves: list[Any]
    structure: TreeSpec
    tensors: list[Tensor]
    key: Hashable


class InputBinder:
    """Binds batches to the signature of a model's forward, before and after it is traced.

    Args:
        model: read once, with ``inspect.signature``, which looks through ``functools.wraps``.
    """

    def __init__(self, model: nn.Module) -> None:
        self.owner = type(model).__name__
        self.signature = inspect.signature(model.forward)
        self._extra = next(
            (p.name for p in self.signature.parameters.values() if p.kind is p.VAR_KEYWORD), None
        )

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> BoundInputs:
        """Takes a batch apart; its tensors are in placeholder order.

        Raises:
            InputError: the arguments do not bind to forward.
        """
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InputError(
                f"the batch does not fit the forward of {self.owner}: {error}",
                at=f"forward{self.signature}",
                hint="pass what the model itself takes",
            ) from None
        bound.apply_defaults()
        leaves, structure = flatten(dict(bound.arguments))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return BoundInputs(leaves, structure, tensors, (structure, *map(_leaf_key, leaves)))

    def call_form(
        self, arguments: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Bound arguments passed as `args` and `kwargs` passed theirs.

        A decorated forward may tell a keyword from a position, or an omitted one from a default.
        """
        bound = inspect.BoundArguments(self.signature, dict(arguments))
        extra = arguments[self._extra] if self._extra else {}
        keywords = {name: extra[name] if name in extra else arguments[name] for name in kwargs}
        return bound.args[: len(args)], keywords


@dataclass(frozen=True)
class Placeholder:
    """One tensor input of a graph.

    Args:
        name: of the placeholder node.
        parameter: of the model's forward that the tensor came in; ``args`` for ``*args``.
        path: the tensor as the user would write it: ``batch['ids'][0]``.
    """

    name: str
    parameter: str
    path: str


@dataclass(frozen=True)
class InputSpec:
    """What a graph was traced for: structure, constants, and the kind of each tensor.

    Args:
        binder: of the model that was traced.
        placeholders: in graph order, which is the order of the tensors that `bind` returns.
        example: the batch it was traced with; its tensors are on the meta device.
    """

    binder: InputBinder
    placeholders: tuple[Placeholder, ...]
    example: BoundInputs

    @property
    def key(self) -> Hashable:
        """Equal to ``InputBinder(model).bind(args, kwargs).key`` for the batches that fit."""
        return self.example.key

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of a batch, in placeholder order.

        Raises:
            InputError: the batch does not bind to forward, or its structure, a constant, or a
                tensor's dtype or number of dimensions differs from what was traced.
        """
        bound = self.binder.bind(args, kwargs)
        if bound.key != self.example.key:
            self._check(bound)
        return bound.tensors

    def _check(self, bound: BoundInputs) -> None:
        hint = "a graph is made for one structure: trace again for this batch"
        if bound.structure != self.example.structure:
            raise InputError(
                "the batch has another structure than the one that was traced",
                at=f"{bound.structure} instead of {self.example.structure}",
                hint=hint,
            )
        paths = paths_of(bound.structure)
        for path, now, then in zip(paths, bound.leaves, self.example.leaves, strict=True):
            if not _fits(now, then):
                raise InputError(
                    f"input {path} is {_described(now)}, but {_described(then)} was traced",
                    at=f"forward{self.binder.signature}",
                    hint=hint,
                )


def paths_of(structure: TreeSpec) -> list[str]:
    """Each leaf of the bound arguments as the user would write it."""
    parameters = zip(structure.steps, structure.children, strict=True)
    return [name for step, child in parameters for name in child.names(str(step[0]))]


def placeholder_names(structure: TreeSpec) -> list[tuple[str, str]]:
    """Forward parameter of each leaf of the bound arguments, and a name for its placeholder."""
    return [(str(path[0][0]), _identifier(path)) for path in structure.paths()]


def _identifier(path: Sequence[Step]) -> str:
    name = re.sub(r"\W+", "_", "_".join(str(step[0]) for step in path))
    return f"{name}_" if keyword.iskeyword(name) else name


def _leaf_key(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return (leaf.dtype, leaf.ndim, leaf.requires_grad, leaf.device)
    try:
        hash(leaf)
    except TypeError:
        return (type(leaf), id(leaf))
    return (type(leaf), leaf)


def _fits(now: Any, then: Any) -> bool:
    if isinstance(now, Tensor) and isinstance(then, Tensor):
        return now.dtype == then.dtype and now.ndim == then.ndim
    return _leaf_key(now) == _leaf_key(then)


def _described(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        dtype = str(leaf.dtype).removeprefix("torch.")
        return f"a {leaf.ndim}-dimensional {dtype} tensor"
    return repr(leaf) if isinstance(leaf, (bool, int, float, str, type(None))) else str(type(leaf))


def without_data(bound: BoundInputs) -> BoundInputs:
    """The same batch with its tensors on the meta device: a spec outlives its batch."""
    leaves = [_meta(leaf) if isinstance(leaf, Tensor) else leaf for leaf in bound.leaves]
    return bound._replace(leaves=leaves, tensors=[x for x in leaves if isinstance(x, Tensor)])


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

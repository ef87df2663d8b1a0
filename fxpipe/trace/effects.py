"""What running a call does besides returning a value: writes in place, and random numbers.

Seen below autograd, where every operator names in its schema what it writes, so also inside leaf
modules, through views and behind ``.data``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpipe.compat import DispatchMode, storage_id


class Effects(DispatchMode):  # type: ignore[no-untyped-call]
    """Notes what the operators that run inside it write, and whether one draws random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.clear()

    def clear(self) -> None:
        """Forgets what was seen: a mode serves many calls."""
        self.written: set[int] = set()  # ids of tensors, alive as long as the call's arguments
        self.storages: set[int] = set()
        self.random = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        named = _named_arguments(func, args, kwargs)
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._note(named.get(argument.name))
        if _updates_statistics(func.__name__, named):
            self._note(named.get("running_mean"))
            self._note(named.get("running_var"))
        if torch.Tag.nondeterministic_seeded in func.tags:
            # attention is tagged whether or not it drops anything
            attends = "attention" in func.__name__
            self.random = self.random or not attends or named.get("dropout_p", 0.0) != 0.0
        return func(*args, **kwargs)

    def _note(self, value: Any) -> None:
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, Tensor):
                self.written.add(id(tensor))
                self.storages.add(storage_id(tensor))

    def mutated(self, arguments: Sequence[tuple[str, Tensor]]) -> tuple[str, ...]:
        """Names of the arguments that were written, of a call's (node name, tensor) pairs.

        A write that hit an argument itself is not blamed on others that share its memory.
        """
        exact = [(name, t) for name, t in arguments if id(t) in self.written]
        explained = {storage_id(t) for _, t in exact}
        rest = self.storages - explained
        behind_views = [(n, t) for n, t in arguments if storage_id(t) in rest]
        return tuple(dict.fromkeys(name for name, _ in (*exact, *behind_views)))


def _updates_statistics(name: str, named: dict[str, Any]) -> bool:
    # batch norm in training updates its running statistics, and most of its schemas do not say so
    if "batch_norm" not in name or "no_update" in name or "no_training" in name:
        return False
    return bool(named.get("training", True))


def _named_arguments(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> dict[str, Any]:
    names = [a.name for a in func._schema.arguments]  # type: ignore[attr-defined]
    return {**dict(zip(names, args, strict=False)), **kwargs}

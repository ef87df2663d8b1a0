"""Computes tensors that are made of sizes and constants alone, so that code may branch on them.

``(torch.arange(n).diff() == 1).all()`` holds no data of the batch: the example's sizes tell it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.ir.annotations import is_random, mutates_of, updates_buffers, value_of
from fxpipe.trace.proxies import map_values

_MAX_ELEMENTS = 1 << 20  # of one tensor: a mask of 1024 by 1024, computed in milliseconds


class Unknown(Exception):  # noqa: N818 - an answer, not an error
    """The value depends on the batch, on parameters or on random numbers."""


class Folder:
    """Runs nodes for real, each once.

    Args:
        look: gives the fake value of a node, and of a size the size itself.
        after_trace: the nodes asked for were known during the trace: what is written, is written
            after they were asked for.
    """

    def __init__(
        self, look: Callable[[fx.Node], Any] = value_of, *, after_trace: bool = False
    ) -> None:
        self._look, self._after_trace = look, after_trace
        self._known: dict[fx.Node, Any] = {}

    def value(self, node: fx.Node) -> Any:
        """What the node gives for the sizes that `look` gives.

        Raises:
            Unknown: sizes do not tell.
        """
        if node not in self._known:
            self._known[node] = self._run(node)
        return self._known[node]

    def _run(self, node: fx.Node) -> Any:
        value = self._look(node)
        if not isinstance(value, (Tensor, tuple, list, dict)) or isinstance(value, torch.Size):
            return value  # a size: what it was computed from has been looked at by then
        written = any(node.name in mutates_of(user) for user in node.users)
        acts = written or mutates_of(node) or updates_buffers(node) or is_random(node)
        if acts and not self._after_trace:
            raise Unknown
        if isinstance(value, Tensor) and value.numel() > _MAX_ELEMENTS:
            raise Unknown
        args = map_values(self._argument, tuple(node.args))
        kwargs = map_values(self._argument, dict(node.kwargs))
        with torch.no_grad():
            if node.op == "call_function":
                return node.target(*args, **kwargs)  # type: ignore[operator]
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        raise Unknown

    def _argument(self, leaf: Any) -> Any:
        return self.value(leaf) if isinstance(leaf, fx.Node) else leaf

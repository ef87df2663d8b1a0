"""The two operators that stand in a stage graph for a transfer, and the port that carries them out.

Both are ``torch.library`` custom operators whose first argument or second argument is the
microbatch index, a placeholder of the graph. Only this form survives retracing, pickling,
dead-code elimination, ``make_fx`` and ``torch.compile``: a graph is retraced when it is unpickled,
and a plain function without a proxy argument would communicate during that trace.

Neither has an autograd formula: gradients travel as actions of the schedule, never because the
autograd engine happens to reach a node.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, fx

# Kept alive by the module: the operators vanish with the object that defined them.
_library = torch.library.Library("fxpipe", "DEF")  # type: ignore[no-untyped-call]
_RECV = (
    "recv(SymInt mb, SymInt[] shape, ScalarType dtype, Device device, int src, int edge) -> Tensor"
)
_SEND = "send(Tensor x, SymInt mb, int dst, int edge) -> Tensor"
for _schema in (_RECV, _SEND):
    _library.define(_schema)  # type: ignore[no-untyped-call]


class Port(Protocol):
    """What ``recv`` and ``send`` call while a stage graph runs."""

    def recv(
        self, mb: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device, edge: int
    ) -> Tensor:
        """Returns the value of `edge` for microbatch `mb`."""
        ...

    def send(self, value: Tensor, mb: int, edge: int) -> None:
        """Takes the value of `edge` for microbatch `mb`."""
        ...


class Mailbox:
    """A port for graphs that run in one process: what was sent is received unchanged."""

    def __init__(self) -> None:
        self.values: dict[tuple[int, int], Tensor] = {}

    def recv(
        self, mb: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device, edge: int
    ) -> Tensor:
        return self.values.pop((edge, mb))

    def send(self, value: Tensor, mb: int, edge: int) -> None:
        self.values[edge, mb] = value


_active: list[Port] = []


@contextlib.contextmanager
def port(value: Port) -> Iterator[Port]:
    """Makes `value` the port of every ``recv`` and ``send`` that runs inside the block."""
    _active.append(value)
    try:
        yield value
    finally:
        _active.pop()


def _current() -> Port:
    if not _active:
        raise RuntimeError("a stage graph communicates: run it inside `with fxpipe.ops.port(...)`")
    return _active[-1]


@torch.library.impl(_library, "recv", "CompositeExplicitAutograd")
def _recv(
    mb: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device, src: int, edge: int
) -> Tensor:
    return _current().recv(mb, shape, dtype, device, edge)


@torch.library.impl(_library, "send", "CompositeExplicitAutograd")
def _send(x: Tensor, mb: int, dst: int, edge: int) -> Tensor:
    _current().send(x, mb, edge)
    return x.new_empty(0)


@torch.library.register_fake("fxpipe::recv", lib=_library)  # type: ignore[untyped-decorator]
def _(
    mb: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device, src: int, edge: int
) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


@torch.library.register_fake("fxpipe::send", lib=_library)  # type: ignore[untyped-decorator]
def _(x: Tensor, mb: int, dst: int, edge: int) -> Tensor:
    return x.new_empty(0)


recv = torch.ops.fxpipe.recv.default
send = torch.ops.fxpipe.send.default
# Enough for dead-code elimination; an effect token would break torch.compile of a region.
fx.node.has_side_effect(recv)
fx.node.has_side_effect(send)


def boundary(value: Tensor, edge: int) -> Tensor:
    """Stands between a value and its readers on another stage until the edge is lowered."""
    return value

"""Sends torch calls without a proxy in them to the tracer too.

fx only records calls that are handed a proxy: left to itself, ``torch.rand(2, 3)`` would give the
same numbers at every step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fxpipe.trace.proxies import UntraceableError, proxies_in
from fxpipe.trace.state import FakeState
from fxpipe.tree import flatten

if TYPE_CHECKING:
    from fxpipe.trace.tracer import ValueTracer

_FACTORY_NAMES = """
    arange as_tensor bartlett_window blackman_window empty empty_permuted empty_strided eye full
    hamming_window hann_window kaiser_window linspace logspace normal ones rand randint randn
    randperm range scalar_tensor tensor tril_indices triu_indices zeros
"""
FACTORIES: frozenset[Callable[..., Any]] = frozenset(
    getattr(torch, name) for name in _FACTORY_NAMES.split()
)
"""Functions that make tensors of numbers and sizes."""


CONSTANTS = (
    bool,
    int,
    float,
    complex,
    str,
    type(None),
    type(...),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
"""Types of values that may stand in a graph as they are."""

# methods whose result is Python's, which of a constant is known
_ASKS_PYTHON = frozenset(
    [
        "__get__",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__len__",
        "__repr__",
        "__format__",
        "__hash__",
        "__iter__",
        "item",
        "tolist",
        "numpy",
        "size",
        "dim",
        "numel",
        "stride",
        "is_floating_point",
        "is_complex",
    ]
)


def worth_a_node(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], state: FakeState
) -> bool:
    """Whether a call without proxies must happen at every run: it makes or reads what may change.

    Raises:
        UntraceableError: it draws from a generator, which no graph can hold.
    """
    leaves = flatten((args, kwargs))[0]
    if func in FACTORIES:
        if kwargs.get("generator") is not None:
            raise UntraceableError("draws random numbers from a generator of its own")
        return all(isinstance(leaf, (*CONSTANTS, torch.Size)) for leaf in leaves)
    if getattr(func, "__name__", "") in _ASKS_PYTHON:
        return False
    return any(isinstance(x, Tensor) and state.name_of(x) is not None for x in leaves)


class TorchCalls(TorchFunctionMode):
    """Hands every torch call of the model's own code to the tracer."""

    def __init__(self, tracer: ValueTracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self.tracer.busy:
            return func(*args, **(kwargs or {}))
        return self.tracer.record_torch_call(func, args, kwargs or {})


@contextlib.contextmanager
def factories_take_proxies() -> Iterator[None]:
    """Lets ``torch.zeros(n)`` take a proxy as a size: torch's parser asks for a number first."""
    originals = {name: getattr(torch, name) for name in _FACTORY_NAMES.split()}
    for name, original in originals.items():
        setattr(torch, name, recorded(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)


def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that becomes a node where it is given a proxy."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if found := proxies_in((args, kwargs)):
            return found[0].tracer.record("call_function", function, args, kwargs)
        return function(*args, **kwargs)

    return call

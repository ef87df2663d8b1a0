"""Sends torch calls without a proxy in them to the tracer too, and lets type checks see values.

fx only records calls that are handed a proxy. Left to itself ``torch.rand(2, 3)`` would give the same
numbers at every step, and ``isinstance(x, torch.Tensor)`` would take the branch for no tensor.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fxpipe.trace.proxies import ValueProxy, proxies_in

if TYPE_CHECKING:
    from fxpipe.trace.tracer import ValueTracer

_FACTORY_NAMES = """
    arange as_tensor bartlett_window blackman_window empty empty_permuted empty_strided eye full
    hamming_window hann_window kaiser_window linspace logspace normal ones rand randint randn randperm
    range scalar_tensor tensor tril_indices triu_indices zeros
"""
FACTORIES: frozenset[Callable[..., Any]] = frozenset(
    getattr(torch, name) for name in _FACTORY_NAMES.split()
)
"""Functions that make tensors of numbers and sizes."""


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
    """Lets ``torch.zeros(n)`` take a size that is a proxy: torch's parser asks for a number first."""
    originals = {name: getattr(torch, name) for name in _FACTORY_NAMES.split()}
    for name, original in originals.items():
        setattr(torch, name, _recorded(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)


def _recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if found := proxies_in((args, kwargs)):
            return found[0].tracer.record("call_function", function, args, kwargs)
        return function(*args, **kwargs)

    return recorded


recorded = _recorded


@contextlib.contextmanager
def type_checks_see_values(model: nn.Module) -> Iterator[None]:
    """In the model's own Python modules, ``isinstance`` of a proxy is also that of its value.

    A name in a module's globals hides the builtin from the code of that module alone; faking
    ``__class__`` instead would deceive torch's C code, which crashes on what is no tensor.
    """
    namespaces = _namespaces_of(model)
    original_is_tensor = torch.is_tensor
    for namespace in namespaces:
        namespace["isinstance"] = _isinstance
    torch.is_tensor = lambda obj: _isinstance(obj, torch.Tensor)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.is_tensor = original_is_tensor  # type: ignore[assignment]
        for namespace in namespaces:
            del namespace["isinstance"]


def _isinstance(obj: object, classes: Any) -> bool:
    if builtins.isinstance(obj, classes):
        return True
    return builtins.isinstance(obj, ValueProxy) and builtins.isinstance(obj.value, classes)


def _namespaces_of(model: nn.Module) -> list[dict[str, Any]]:
    """Globals of all modules of the packages that define the classes of a model, torch's excepted."""
    packages = {
        cls.__module__.partition(".")[0] for m in model.modules() for cls in type(m).__mro__
    } - {"torch", "builtins", "fxpipe"}
    found = [
        vars(module)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in packages
        and "isinstance" not in getattr(module, "__dict__", {})
    ]
    return list({id(namespace): namespace for namespace in found}.values())

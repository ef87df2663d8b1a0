"""Lets ``isinstance`` and ``type`` in the model's code see the value behind what stands for it.

Without it, ``isinstance(x, torch.Tensor)`` takes the branch for no tensor where x is a proxy, and
``isinstance(n, int)`` that for no number where n is a size of torch.export; and nobody is told.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.compat import FakeTensor, no_fake_mode
from fxpipe.trace.proxies import ValueProxy

_STAND_INS = (ValueProxy, FakeTensor, torch.SymInt, torch.SymFloat, torch.SymBool)


@contextlib.contextmanager
def type_checks_see_values(model: nn.Module) -> Iterator[None]:
    """In the Python modules of the model's packages, type checks of proxies are of their values.

    A name in a module's globals hides the builtin from the code of that module alone; faking
    ``__class__`` instead would deceive torch's C code, which crashes on what is no tensor.
    """
    hidden = [
        (namespace, name, check)
        for namespace in _namespaces_of(model)
        for name, check in _CHECKS.items()
        if name not in namespace
    ]
    is_tensor = torch.is_tensor
    for namespace, name, check in hidden:
        namespace[name] = check
    torch.is_tensor = lambda obj: _isinstance(obj, Tensor)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.is_tensor = is_tensor
        for namespace, name, _ in hidden:
            del namespace[name]


def _type(obj: object, *rest: Any, **keywords: Any) -> Any:
    if rest:
        return builtins.type(obj, *rest, **keywords)
    if builtins.isinstance(obj, _STAND_INS):
        return builtins.type(_as_seen_by_the_user(obj))
    return builtins.type(obj)


def _isinstance(obj: object, classes: Any) -> bool:
    classes = _without_our_type(classes)
    if builtins.isinstance(obj, _STAND_INS) and builtins.isinstance(
        _as_seen_by_the_user(obj), classes
    ):
        return True
    # libraries ask for a proxy to learn whether they may look at the data
    hides_data = not builtins.isinstance(obj, ValueProxy) or obj.tracer.known(obj) is None
    return builtins.isinstance(obj, classes) and hides_data


def _callable(obj: object) -> bool:
    return builtins.callable(obj.value if builtins.isinstance(obj, ValueProxy) else obj)


_CHECKS = {"isinstance": _isinstance, "type": _type, "callable": _callable}


def _without_our_type(classes: Any) -> Any:
    if builtins.isinstance(classes, tuple):
        return tuple(_without_our_type(cls) for cls in classes)
    return builtins.type if classes is _type else classes


def _as_seen_by_the_user(obj: Any) -> Any:
    """The value, or for a fake tensor an empty one of the class that it is a fake of."""
    if builtins.isinstance(obj, torch.SymInt):
        return 0
    if builtins.isinstance(obj, torch.SymFloat):
        return 0.0
    if builtins.isinstance(obj, torch.SymBool):
        return False
    if not builtins.isinstance(obj, ValueProxy):
        return _empty(obj)
    if not builtins.isinstance(obj.value, Tensor):
        return obj.value
    with obj.tracer.quiet():
        return _empty(obj.value)


def _empty(fake: Tensor) -> Tensor:
    with no_fake_mode():
        empty = torch.empty(0, dtype=fake.dtype)
    if builtins.isinstance(fake, nn.Parameter):
        return nn.Parameter(empty, requires_grad=False)
    return empty


def _namespaces_of(model: nn.Module) -> list[dict[str, Any]]:
    """Globals of all modules of the packages that define a model's classes, torch's excepted."""
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

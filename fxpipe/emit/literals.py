"""Values as Python code that makes them again: the tables of a script."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from fxpipe.errors import FxpipeError

_WIDTH = 100


def literal(value: object, indent: int = 0, *, used: int = 0) -> str:
    """Code for a value: on one line if it fits, else one item a line, as formatters do.

    A dataclass comes from ``fxpipe.runtime.script``, without the fields that have their default.

    >>> from fxpipe.runtime.stage import Send, TensorLayout
    >>> print(literal({0: TensorLayout((2, 3), torch.float32)}))
    {0: script.TensorLayout(shape=(2, 3), dtype=torch.float32)}
    >>> print(literal([Send(edge=edge, target=2, output=0) for edge in range(3)]))
    [
        script.Send(edge=0, target=2, output=0),
        script.Send(edge=1, target=2, output=0),
        script.Send(edge=2, target=2, output=0),
    ]

    Args:
        value: of the kinds that tables hold.
        indent: of the line it stands on, in spaces.
        used: characters that stand before and after it on that line.

    Raises:
        FxpipeError: it is of another kind.
    """
    if (parts := _parts(value)) is None:
        return _atom(value)
    inner = [(start, literal(item)) for start, item in parts.items]
    comma = "," if isinstance(value, tuple) and len(inner) == 1 else ""
    line = parts.start + ", ".join(start + text for start, text in inner) + comma + parts.end
    if indent + used + len(line) <= _WIDTH or not inner:
        return line
    pad = " " * (indent + 4)
    lines = [
        f"{pad}{start}{literal(item, indent + 4, used=len(start) + 1)},\n"
        for start, item in parts.items
    ]
    return f"{parts.start}\n{''.join(lines)}{' ' * indent}{parts.end}"


class _Parts(NamedTuple):
    """A container taken apart, one level deep."""

    start: str
    items: list[tuple[str, object]]  # what stands before the item on its line, and the item
    end: str


def _parts(value: object) -> _Parts | None:
    if isinstance(value, list):
        return _Parts("[", [("", item) for item in value], "]")
    if isinstance(value, tuple):
        return _Parts("(", [("", item) for item in value], ")")
    if isinstance(value, Mapping):
        return _Parts("{", [(f"{literal(k)}: ", item) for k, item in value.items()], "}")
    if isinstance(value, slice):
        return _Parts("slice(", [("", v) for v in (value.start, value.stop, value.step)], ")")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(f.name, getattr(value, f.name), f.default) for f in dataclasses.fields(value)]
        shown: list[tuple[str, object]] = [(f"{n}=", v) for n, v, default in fields if v != default]
        return _Parts(f"script.{type(value).__name__}(", shown, ")")
    return None


def _atom(value: object) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    if isinstance(value, torch.device):
        return f"torch.{value!r}"
    if isinstance(value, str):
        return f'"{value}"' if repr(value) == f"'{value}'" and '"' not in value else repr(value)
    if isinstance(value, complex):
        return f"complex({_atom(value.real)}, {_atom(value.imag)})"
    if value is None or isinstance(value, (bool, int, float, torch.dtype)):
        return repr(value)
    raise FxpipeError(f"a {type(value).__name__} cannot be written into a script", at=repr(value))

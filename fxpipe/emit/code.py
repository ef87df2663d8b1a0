"""The code of a graph as a function of a script, as torch.fx prints it."""

from __future__ import annotations

import builtins
import dataclasses
import importlib
import math
import re
from collections.abc import Iterable
from types import ModuleType

from torch import fx

from fxpipe.errors import FxpipeError


@dataclasses.dataclass(frozen=True)
class FunctionCode:
    """A function of a script.

    Args:
        name: of the function.
        text: its code.
        imports: lines that define the global names in it, besides ``torch``.
    """

    name: str
    text: str
    imports: tuple[str, ...] = ()


def function_code(graph: fx.Graph, name: str) -> FunctionCode:
    """What torch.fx prints for a graph, under another name.

    Args:
        graph: its first argument, the module, is ``self``.
        name: of the function.

    Raises:
        FxpipeError: it calls something that a script cannot import.
    """
    printed = graph.python_code("self")
    # fx.wrap() marks what a trace keeps whole: a script is not traced
    text = re.sub(r"(?m)^wrap\(.*\n", "", printed.src).strip("\n")
    # a return annotation names a type that says nothing, tuple[Any, ...]
    text = re.sub(r"^def forward\((.*)\)(?: -> .*)?:", rf"def {name}(\1):", text)
    imports = []
    for given, value in printed.globals.items():
        word = rf"(?<!\.)\b{re.escape(given)}\b"
        if given == "torch" or not re.search(word, text) or vars(builtins).get(given) is value:
            continue
        known = _name_of_method(value) or given
        text = re.sub(word, known, text)
        imports.append(import_line(known, value, at=f"def {name}"))
    return FunctionCode(name, text.rstrip() + "\n", tuple(imports))


def _name_of_method(value: object) -> str | None:
    """A name for the method of a class: fx calls those of all classes alike."""
    owner = getattr(value, "__self__", None)
    if not isinstance(owner, type):
        return None
    return re.sub(r"\W", "_", f"{owner.__module__}.{owner.__qualname__}.{value.__name__}")  # type: ignore[attr-defined]


def merge_imports(functions: Iterable[FunctionCode]) -> list[str]:
    """The imports of several functions, each once."""
    return sorted({line for function in functions for line in function.imports})


def import_line(name: str, value: object, *, at: str) -> str:
    """A line that binds `name` to `value` in a script.

    >>> import torch.nn.functional
    >>> import_line("relu", torch.nn.functional.relu, at="")
    'from torch.nn.functional import relu'

    Raises:
        FxpipeError: the value is not what any module has under its name.
    """
    if isinstance(value, ModuleType):
        return f"import {value.__name__}" + (f" as {name}" if name != value.__name__ else "")
    if isinstance(value, float):
        return f"from math import {name}" if name in vars(math) else f"{name} = {value!r}"
    if value is type(None):
        return f"{name} = type(None)"
    owner = getattr(value, "__self__", None)
    method = f".{value.__name__}" if isinstance(owner, type) else ""  # type: ignore[attr-defined]
    source = owner if method else value
    module, path = getattr(source, "__module__", None), getattr(source, "__qualname__", "")
    if module is None or not _leads_to(module, path, source):
        raise FxpipeError(
            f"{path or repr(source)} cannot be imported by a script",
            at=at,
            hint="define it at the top level of a module, not in the file that is run",
        )
    if "." in path or method:
        return f"import {module}; {name} = {module}.{path}{method}"
    return f"from {module} import {path}" + (f" as {name}" if name != path else "")


def _leads_to(module: str, path: str, value: object) -> bool:
    if module == "__main__":  # in a script that is the script
        return False
    try:
        found: object = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return False
    return found is value

"""Loads the model that a subcommand works on from a Python file or module."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fxpipe.errors import OptionError
from fxpipe.options import CompileOptions

_KEYS = (
    "make() returns a mapping with model and args, and optionally kwargs, target, and what "
    "compile takes"
)
_OPTIONS = frozenset(field.name for field in dataclasses.fields(CompileOptions))


@dataclasses.dataclass(frozen=True)
class ModelFile:
    """A model with one batch, and how it is meant to be compiled.

    Args:
        model: in the mode in which it was made.
        args: positional inputs, a whole batch.
        kwargs: keyword inputs.
        target: what the loss compares with.
        options: those of ``compile`` that the file sets, such as ``loss`` and ``stages``.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Any
    options: Mapping[str, Any]


def load_model(spec: str, *, seed: int = 0) -> ModelFile:
    """Calls ``make()`` of ``FILE.py`` or ``package.module``.

    The mapping it returns may set every option of ``compile`` under its own name;
    ``batch_dims`` also goes by ``split``.

    Args:
        spec: a path, or the name of a module that can be imported from the current folder.
        seed: set before the file is read, so that every rank builds the same model.

    Raises:
        OptionError: there is no such file or module, or it gives no model.
    """
    torch.manual_seed(seed)
    module = _from_path(Path(spec)) if spec.endswith(".py") else _from_name(spec)
    make = getattr(module, "make", None)
    if not callable(make):
        raise OptionError(f"{spec} has no function make()", hint=_KEYS)
    made = make()
    if not isinstance(made, Mapping):
        raise OptionError(f"make() returns a {type(made).__name__}", at=spec, hint=_KEYS)
    if not isinstance(made.get("model"), nn.Module):
        kind = type(made["model"]).__name__ if "model" in made else "missing"
        raise OptionError(f"the model is {kind}, not an nn.Module", at=spec, hint=_KEYS)
    options = {name: made[name] for name in made if name in _OPTIONS}
    if "split" in made:
        options.setdefault("batch_dims", made["split"])
    return ModelFile(
        model=made["model"],
        args=tuple(made.get("args", ())),
        kwargs=dict(made.get("kwargs") or {}),
        target=made.get("target"),
        options=options,
    )


def _from_path(path: Path) -> ModuleType:
    if not path.is_file():
        raise OptionError(f"there is no file {path}", at=f"in {Path.cwd()}")
    _importable(path.parent.resolve())
    # the file's own name, so that pickled classes are found again; not that of another module
    name = path.stem if path.stem not in sys.modules else f"{path.stem} ({path.resolve()})"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # its name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _from_name(name: str) -> ModuleType:
    _importable(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # found, and something that it imports is not
        raise OptionError(
            f"there is no module {name}",
            at=f"in {Path.cwd()}",
            hint="name a file that ends in .py, or a module that can be imported from this folder",
        ) from None


def _importable(folder: Path) -> None:
    """Lets the file import its neighbours, as ``python FILE.py`` does."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

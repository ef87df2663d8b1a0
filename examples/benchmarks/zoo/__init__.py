"""The models of the zoo, by library; a library that is not installed adds none."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable

from zoo.case import Case, Entry

LIBRARIES = {"torchvision": "torchvision", "transformers": "huggingface", "timm": "timm"}
"""Library -> module of this package that makes its models."""


def corpus(libraries: Iterable[str] = LIBRARIES) -> list[Entry]:
    """The entries of these libraries, as far as they are installed."""
    entries: list[Entry] = []
    for library in libraries:
        if importlib.util.find_spec(library) is not None:
            entries += importlib.import_module(f"zoo.{LIBRARIES[library]}").ENTRIES
    return entries


__all__ = ["LIBRARIES", "Case", "Entry", "corpus"]

"""Where the values of a model on the meta device come from, tensor by tensor."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import InputError, OptionError
from fxpipe.options import Init, WeightSource


class Weights:
    """Gives each tensor of a stage its value, and reads no other.

    Args:
        source: state dict under the model's own names; None: everything is made by `init`.
        init: makes what the source does not have. It sees a random number generator that depends
            on the name and on the seed alone, so that a tensor has the same value on whatever rank.

    Raises:
        OptionError: the source cannot be read.
    """

    def __init__(self, source: WeightSource | None, init: Init | None) -> None:
        self._init = init
        self._seed = torch.initial_seed()
        self._entries = _open(source)

    def fill(self, tensor: Tensor, names: Iterable[str]) -> None:
        """Fills a tensor from the first of its names that the source has, else by `init`.

        Raises:
            InputError: neither has it, or its shape is another.
        """
        names = list(names)
        found = next((name for name in names if name in self._entries), None)
        if found is not None:
            value = self._entries[found]
            if value.shape != tensor.shape:
                raise InputError(
                    f"{found} has shape {list(value.shape)} in the weights, "
                    f"and {list(tensor.shape)} in the model"
                )
            with torch.no_grad():
                tensor.copy_(value)
        elif self._init is not None:
            digest = hashlib.sha256(f"{self._seed} {names[0]}".encode()).digest()
            with torch.no_grad(), torch.random.fork_rng():
                torch.manual_seed(int.from_bytes(digest[:8], "big", signed=True))
                self._init(names[0], tensor)
        else:
            raise InputError(
                f"{names[0]} is on the meta device, and nothing says what its value is",
                hint="pass weights=, a state dict or its path, that has it, "
                "or init=, a function (name, tensor) that fills it in place",
            )


def _open(source: WeightSource | None) -> Mapping[str, Tensor]:
    if source is None:
        return {}
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    if not path.is_file():
        raise OptionError(f"no file of weights at {path}", at=f"weights={str(source)!r}")
    if path.suffix == ".safetensors":
        return _Safetensors([path])
    if path.name.endswith(".safetensors.index.json"):
        shards = json.loads(path.read_text())["weight_map"].values()
        return _Safetensors([path.parent / shard for shard in sorted(set(shards))])
    # mapped: the entries of other stages are never read from disk
    loaded: Mapping[str, Tensor] = torch.load(path, mmap=True, weights_only=True)
    return loaded


class _Safetensors(Mapping[str, Tensor]):
    """The entries of some safetensors files, each read when it is asked for."""

    def __init__(self, paths: Iterable[Path]) -> None:
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise OptionError(
                "reading .safetensors needs the package safetensors",
                hint="pip install 'fxpipe[hf]'",
            ) from error
        files: list[Any] = [safe_open(path, framework="pt") for path in paths]
        self._file_of: dict[str, Any] = {n: file for file in files for n in file.keys()}  # noqa: SIM118

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

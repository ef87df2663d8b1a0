"""Saved state under the names of the model that was handed in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe import compat
from fxpipe.errors import InputError
from fxpipe.runtime.collectives import Collectives


class ModelState:
    """The parameters, buffers and state dict of a model, which its stages share.

    **Terms.** The *canonical name* of a tensor is its first name, the one that
    ``named_parameters()`` gives; a tied one has others too, and the state dict holds it under all
    of them.

    Args:
        model: the model that was handed in.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        first: dict[int, str] = {}
        self.canonical: dict[str, str] = {}
        for name, tensor in [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]:
            self.canonical[name] = first.setdefault(id(tensor), name)

        self._moved: dict[str, Tensor] = {}

    def move(self, modules: Iterable[nn.Module], device: torch.device) -> None:
        """Gives the stages of this process their own state on its device.

        Nothing moves where the model is on that device already: then stages and model share it.
        """
        for module in modules:
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                first = self.canonical.get(name, name)
                if tensor.device == device or tensor.is_meta:
                    continue
                if first not in self._moved:
                    moved = tensor.detach().to(device)
                    if isinstance(tensor, nn.Parameter):
                        moved = nn.Parameter(moved, requires_grad=tensor.requires_grad)
                    self._moved[first] = moved
                for holder in module.modules():
                    compat.replace_state(holder, tensor, self._moved[first])

    def parameters(self) -> dict[str, nn.Parameter]:
        """By canonical name, in the order of the model."""
        return {n: self._here(n, p) for n, p in self._model.named_parameters()}

    def buffers(self) -> dict[str, Tensor]:
        """By canonical name, in the order of the model."""
        return {n: self._here(n, b) for n, b in self._model.named_buffers()}

    def _here(self, name: str, tensor: Any) -> Any:
        return self._moved.get(name, tensor)

    def state_dict(self, is_here: Callable[[str], bool]) -> OrderedDict[str, Any]:
        """The entries of the state dict whose tensors are here, and the versions of modules."""
        state = self._model.state_dict()
        kept = OrderedDict(
            (key, self._moved.get(first, value))
            for key, value in state.items()
            for first in (self.canonical.get(key, key),)
            if is_here(first)
        )
        return _with_metadata(kept, state)

    def gather(
        self, here: Mapping[str, Any], collectives: Collectives, rank: int
    ) -> OrderedDict[str, Any]:
        """The whole state dict, from the parts of all ranks; tensors of other ranks on CPU."""
        part = {k: v.detach().cpu() if isinstance(v, Tensor) else v for k, v in here.items()}
        found: dict[str, Any] = {}
        for other in reversed(collectives.gather({rank: part})):
            found.update(other)
        found.update(here)
        order = self._model.state_dict()
        return _with_metadata(OrderedDict((k, found[k]) for k in order), order)

    def load(
        self, state_dict: Mapping[str, Any], is_here: Callable[[str], bool], *, strict: bool
    ) -> None:
        """Copies the entries whose tensors are here.

        Raises:
            InputError: `strict`, and an entry is missing or unknown.
        """
        known = self._model.state_dict()
        wanted = {k for k in known if is_here(self.canonical.get(k, k))}
        missing, unknown = sorted(wanted - set(state_dict)), sorted(set(state_dict) - set(known))
        if strict and (missing or unknown):
            raise InputError(
                f"the state dict lacks {len(missing)} entries and has {len(unknown)} unknown ones",
                at=f"missing: {missing[:8]}; unknown: {unknown[:8]}",
                hint="pass strict=False to load what fits",
            )
        part = OrderedDict((k, v) for k, v in state_dict.items() if k in wanted)
        with torch.no_grad():
            self._model.load_state_dict(_with_metadata(part, state_dict), strict=False)
            loaded = dict(self._model.named_parameters()) | dict(self._model.named_buffers())
            for name, tensor in self._moved.items():
                tensor.copy_(loaded[name])


def _with_metadata(
    entries: OrderedDict[str, Any], source: Mapping[str, Any]
) -> OrderedDict[str, Any]:
    """Keeps the version of every module: without it torch rebuilds some of them on loading."""
    metadata = getattr(source, "_metadata", None)
    if metadata is not None:
        entries._metadata = metadata  # type: ignore[attr-defined]
    return entries

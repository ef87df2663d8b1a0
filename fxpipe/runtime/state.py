"""Saved state under the names of the model that was handed in."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe import compat
from fxpipe.errors import InputError
from fxpipe.runtime.collectives import Collectives
from fxpipe.runtime.weights import Weights


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
        self._names: dict[str, list[str]] = defaultdict(list)
        for name, tensor in [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]:
            self.canonical[name] = first.setdefault(id(tensor), name)
            self._names[self.canonical[name]].append(name)
        self._moved: dict[str, Tensor] = {}

    @property
    def is_meta(self) -> bool:
        """Whether some of the model has no memory yet."""
        tensors = [*self._model.parameters(), *self._model.buffers()]
        return any(tensor.is_meta for tensor in tensors)

    def move(
        self, modules: Iterable[nn.Module], device: torch.device, weights: Weights | None
    ) -> None:
        """Gives the stages of this process their own state on its device.

        Nothing moves where the model is on that device already: then stages and model share it.

        Args:
            modules: the stages.
            device: where they compute.
            weights: fills what is on the meta device.

        Raises:
            InputError: a tensor is on the meta device, and the weights do not have it.
        """
        for module in modules:
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                if tensor.device == device:
                    continue
                first = self.canonical.get(name, name)
                if first not in self._moved:
                    self._moved[first] = self._copy(first, tensor, device, weights)
                for holder in module.modules():
                    compat.replace_state(holder, tensor, self._moved[first])

    def adopt(self, device: torch.device, weights: Weights | None, read: Container[str]) -> None:
        """Gives memory to what no stage reads, so that it is saved with the rest."""
        for name, tensor in [*self._model.named_parameters(), *self._model.named_buffers()]:
            if tensor.is_meta and name not in read and name not in self._moved:
                self._moved[name] = self._copy(name, tensor, device, weights)

    def _copy(
        self, first: str, tensor: Tensor, device: torch.device, weights: Weights | None
    ) -> Tensor:
        if tensor.is_meta:
            made = torch.empty_like(tensor, device=device)
            (weights or Weights(None, None)).fill(made, self._names[first])
        else:
            made = tensor.detach().to(device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made.detach(), requires_grad=tensor.requires_grad)
        return made.detach()

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
            InputError: `strict`, and an entry is missing or unknown; or one has another shape.
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
        shared: OrderedDict[str, Any] = OrderedDict()
        with torch.no_grad():
            for key in wanted & set(state_dict):
                own = self._moved.get(self.canonical.get(key, key))
                if own is None:
                    shared[key] = state_dict[key]
                    continue
                if own.shape != state_dict[key].shape:  # copy_ would broadcast
                    raise InputError(
                        f"{key} has shape {list(state_dict[key].shape)} in the state dict, "
                        f"{list(own.shape)} in the model"
                    )
                own.copy_(state_dict[key])
            if shared:
                self._model.load_state_dict(_with_metadata(shared, state_dict), strict=False)


def _with_metadata(
    entries: OrderedDict[str, Any], source: Mapping[str, Any]
) -> OrderedDict[str, Any]:
    """Keeps the version of every module: without it torch rebuilds some of them on loading."""
    metadata = getattr(source, "_metadata", None)
    if metadata is not None:
        entries._metadata = metadata  # type: ignore[attr-defined]
    return entries

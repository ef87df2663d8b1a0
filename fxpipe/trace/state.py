"""Stands fake tensors in for a model's parameters and buffers while it is traced.

The model's own tensors are never reached, so nothing can move them, also not a leaf module that
updates its statistics; afterwards every module has the attributes it had before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.compat import FakeTensorMode, state_of, storage_id
from fxpipe.errors import TraceError

# hooks, which libraries add when a model is called first, are in ordered dictionaries
_RESTORED = (list, dict, OrderedDict, set)


class Change:
    """An attribute that the model's code set on a module while it was traced."""

    def __init__(self, module: str, name: str, value: Any) -> None:
        self.module, self.name, self.value = module, name, value

    def __str__(self) -> str:
        return f"{self.module}.{self.name}" if self.module else self.name


class FakeState:
    """Fake copies of a model's state, put in its place by `install` until `restore`.

    Args:
        model: shares one fake among all names of a tied tensor.
        mode: makes the fakes; tensors that share memory get fakes that share memory.
        device: of every fake; models are traced on the device of their inputs.
    """

    def __init__(self, model: nn.Module, mode: FakeTensorMode, device: torch.device) -> None:
        self._mode, self._device = mode, device
        self._modules = dict(model.named_modules())
        self._fakes: dict[int, Tensor] = {}  # by id of the real tensor
        self._names: dict[int, str] = {}  # by id of a real or fake tensor
        self._by_name: dict[str, Tensor] = {}
        self._kept: list[Tensor] = []  # so that no id is used twice
        self._owners: dict[int, str] = {}  # by memory of a fake
        self._saved: list[tuple[str, nn.Module, tuple[dict[str, Any], ...]]] = []
        self._contents: list[tuple[str, Any, Any]] = []
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self._register(name, tensor)
        for prefix, module in self._modules.items():
            for key, value in vars(module).items():
                if isinstance(value, Tensor) and id(value) not in self._names:
                    self._register(f"{prefix}.{key}" if prefix else key, value)
        self.constants: dict[str, Tensor] = {}

    def _register(self, name: str, real: Tensor) -> None:
        fake = self._fake_of(real)
        self._kept += (real, fake)
        self._by_name[name] = fake
        self._fakes[id(real)] = fake
        self._names[id(real)] = self._names[id(fake)] = name
        self._owners.setdefault(storage_id(fake), name)

    def _fake_of(self, real: Tensor) -> Tensor:
        if nn.parameter.is_lazy(real):
            raise TraceError(
                "a lazy parameter has no shape yet",
                hint="call the model once before it is compiled",
            )
        if real.device == self._device:
            return self._mode.from_tensor(real, static_shapes=True)
        fake = self._empty_like(real, self._device)
        if isinstance(real, nn.Parameter):
            return nn.Parameter(fake, real.requires_grad)
        return fake.requires_grad_(real.requires_grad)

    def input_fake(self, tensor: Tensor) -> Tensor:
        """The fake of an input: a leaf of autograd, on the input's own device unless it is meta."""
        device = self._device if tensor.is_meta else tensor.device
        return self._empty_like(tensor, device).requires_grad_(tensor.requires_grad)

    def _empty_like(self, real: Tensor, device: torch.device) -> Tensor:
        with self._mode:
            return torch.empty_strided(real.size(), real.stride(), dtype=real.dtype, device=device)

    def name_of(self, tensor: Tensor) -> str | None:
        """The first name of a tensor of the model, real or fake; None for other tensors."""
        return self._names.get(id(tensor))

    def owner_of(self, storage: int) -> str | None:
        """Name of the state that lives in this memory of fakes."""
        return self._owners.get(storage)

    def lift(self, tensor: Tensor) -> str:
        """Gives a tensor that the code made or found outside the model a name of its own."""
        name = f"_tensor_constant{len(self.constants)}"
        self.constants[name] = tensor
        self._register(name, tensor)
        return name

    def named(self, name: str) -> Tensor:
        """The fake tensor with this name."""
        return self._by_name[name]

    def install(self, *, attributes: bool = False) -> None:
        """Puts the fakes into the model's modules; notes every attribute as it is.

        Args:
            attributes: also in place of tensors that are plain attributes.
        """
        for prefix, module in self._modules.items():
            parameters, buffers = state_of(module)
            owned = (vars(module), parameters, buffers)
            self._saved.append((prefix, module, tuple(dict(d) for d in owned)))
            for key, value in vars(module).items():
                if type(value) in _RESTORED and key not in ("_parameters", "_buffers"):
                    self._contents.append((f"{prefix}.{key}", value, value.copy()))
            for tensors in (parameters, buffers):
                for key, value in tensors.items():
                    if value is not None:
                        tensors[key] = self._fakes[id(value)]  # type: ignore[assignment]
            if attributes:
                for key, value in list(vars(module).items()):
                    if isinstance(value, Tensor):
                        module.__dict__[key] = self._fakes[id(value)]

    def restore(self) -> list[Change]:
        """Gives every module what it had. Returns the attributes that the code had changed."""
        changes = [*self.changed_attributes(), *self._new_state()]
        for _, module, saved in self._saved:
            owned: tuple[dict[str, Any], ...] = (vars(module), *state_of(module))
            for now, then in zip(owned, saved, strict=True):
                now.clear()
                now.update(then)
        for _, held, then in self._contents:
            held.clear()
            held.extend(then) if isinstance(held, list) else held.update(then)
        return changes

    def changed_attributes(self) -> Iterator[Change]:
        """What the code has set so far, besides parameters and buffers."""
        for prefix, module, (attributes, *_) in self._saved:
            for key, value in vars(module).items():
                if key not in attributes or attributes[key] is not value:
                    yield Change(prefix, key, value)
        for name, held, then in self._contents:
            if type(held) is list and not _same_items(held, then):
                yield Change("", name.removeprefix("."), held.copy())
            if isinstance(held, dict) and not _same_items(list(held.values()), list(then.values())):
                yield Change("", name.removeprefix("."), held.copy())

    def registered(self) -> Iterator[Change]:
        """Parameters and buffers that the code has added so far."""
        for prefix, module, (_, parameters, buffers) in self._saved:
            now: dict[str, Any] = {}
            for tensors in state_of(module):
                now.update(tensors)
            for key in now.keys() - parameters.keys() - buffers.keys():
                yield Change(prefix, key, now[key])

    def _new_state(self) -> Iterator[Change]:
        """Parameters and buffers that are not those of the model."""
        for prefix, module, _ in self._saved:
            for tensors in state_of(module):
                for key, value in tensors.items():
                    if value is not None and id(value) not in self._names:
                        yield Change(prefix, key, value)


def _same_items(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))

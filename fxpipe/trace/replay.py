"""Runs a traced graph on fake values, also where fakes alone cannot."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe import compat
from fxpipe.trace.proxies import map_values

log = logging.getLogger(__name__)


class Replay(fx.Interpreter):
    """Runs a graph with fake state, inside the mode that made it.

    What branches on data, or has a fake kernel stricter than the real one, is run for real on
    zeros; its result has the shape that matters.

    Args:
        gm: the graph; neither its modules nor their state are touched.
        state: a fake for each parameter and buffer, by every name it has.
    """

    def __init__(self, gm: fx.GraphModule, state: Mapping[str, Tensor]) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.extra_traceback = False  # it would print the model's graph into every error
        self._state = state

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return in_plain_containers(args), in_plain_containers(kwargs)

    def fetch_attr(self, target: str) -> Any:
        return self._state[target] if target in self._state else super().fetch_attr(target)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "grouped_mm" in getattr(target, "__name__", ""):  # takes bfloat16 alone (torch 2.14)
            return _on_zeros(target, args, kwargs)
        return super().call_function(target, args, kwargs)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # a copy, so that what forward assigns to `self` does not reach the user's module
        module = compat.share_module(self.module.get_submodule(target))
        named = [*module.named_parameters(), *module.named_buffers()]
        state = {name: self._state[f"{target}.{name}"] for name, _ in named}

        def call(state: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
            return (
                torch.func.functional_call(module, state, args, kwargs)
                if state
                else module(*args, **kwargs)
            )

        try:
            return call(state, *args, **kwargs)
        except compat.DataDependent:
            log.debug("module=%s run on zeros", target)
            return _on_zeros(call, (state, *args), kwargs)


def in_plain_containers(value: Any) -> Any:
    """Arguments of a node as code expects them: fx keeps lists that cannot be written."""
    if type(value) is tuple:
        return tuple(in_plain_containers(item) for item in value)
    if isinstance(value, list):
        return [in_plain_containers(item) for item in value]
    if isinstance(value, dict):
        return {key: in_plain_containers(item) for key, item in value.items()}
    return value


def fake_state(module: nn.Module) -> dict[str, Tensor]:
    """A fake for each parameter and buffer, made inside the active mode; one tensor, one fake."""
    made: dict[int, Tensor] = {}
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return {name: made.setdefault(id(t), fake_like(t)) for name, t in named}


def fake_like(tensor: Tensor) -> Tensor:
    """A fake tensor like this one, made inside the active mode.

    On the CPU also where the real one has no memory yet: a meta parameter meets real inputs.
    """
    device = "cpu" if tensor.is_meta else tensor.device
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake


def _on_zeros(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs a call outside of the fake mode; gives fakes of its results."""

    def zeros(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        made = torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)
        return made.requires_grad_(leaf.requires_grad)

    with compat.no_fake_mode(), torch.random.fork_rng(devices=()):
        found = function(*map_values(zeros, tuple(args)), **map_values(zeros, dict(kwargs)))
    return map_values(lambda leaf: fake_like(leaf) if isinstance(leaf, Tensor) else leaf, found)

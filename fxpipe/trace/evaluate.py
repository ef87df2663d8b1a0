"""Runs one call of a traced model on fake tensors: what it returns, and what else it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fxpipe.compat import DataDependent, FakeTensorMode, storage_id
from fxpipe.trace.effects import Effects
from fxpipe.trace.proxies import UntraceableError, map_values
from fxpipe.trace.state import FakeState


class Outcome(NamedTuple):
    """The result of a call and its effects."""

    value: Any
    mutates: tuple[str, ...]  # names of the argument nodes that are written
    writes_state: bool
    random: bool

    @property
    def pure(self) -> bool:
        return not (self.mutates or self.writes_state or self.random)


class Evaluator:
    """Runs calls under a fake mode, each with its effects observed."""

    def __init__(self, mode: FakeTensorMode, state: FakeState) -> None:
        self._mode, self._state, self._effects = mode, state, Effects()

    def __call__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        named: Sequence[tuple[str, Tensor]],
    ) -> Outcome:
        """Runs ``function(*args, **kwargs)``.

        Args:
            function: what the node calls; a module with its fake state in place.
            args: fakes and Python values.
            kwargs: likewise.
            named: node name and fake of each tensor among the arguments.

        Raises:
            UntraceableError: the result depends on the data of a tensor.
        """
        # its fake kernel takes bfloat16 alone, also where the real one takes float32 (torch 2.14)
        if "grouped_mm" in getattr(function, "__name__", ""):
            return self._on_zeros(function, args, kwargs, named)
        self._effects.clear()
        try:
            with self._mode, self._effects:
                value = function(*args, **kwargs)
        except DataDependent as error:
            if not isinstance(function, nn.Module):
                raise UntraceableError("needs the values of a tensor to go on") from error
            return self._on_zeros(function, args, kwargs, named)
        return self._outcome(value, named, self._writes_state(self._effects.storages))

    def _writes_state(self, storages: set[int]) -> bool:
        return any(self._state.owner_of(storage) is not None for storage in storages)

    def _outcome(
        self, value: Any, named: Sequence[tuple[str, Tensor]], writes_state: bool
    ) -> Outcome:
        seen = self._effects
        return Outcome(value, seen.mutated(named), writes_state, seen.random)

    def _on_zeros(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        named: Sequence[tuple[str, Tensor]],
    ) -> Outcome:
        """Runs a call for real, on zeros: for one that fakes cannot run but a graph can hold."""
        zeros: dict[int, Tensor] = {}

        def real(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) not in zeros:
                zero = torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)
                zeros[id(leaf)] = zero.requires_grad_(leaf.requires_grad)
            return zeros[id(leaf)]

        args, kwargs = map_values(real, args), map_values(real, kwargs)
        state: dict[str, Tensor] = {}
        if isinstance(function, nn.Module):
            state = {
                n: real(t) for n, t in (*function.named_parameters(), *function.named_buffers())
            }
        self._effects.clear()
        with _random_state_kept(), self._effects:
            if state:
                value = torch.func.functional_call(function, state, args, kwargs)  # type: ignore[arg-type]
            else:
                value = function(*args, **kwargs)
        fakes = {id(zero): fake for fake, zero in self._pairs(zeros, named)}
        value = map_values(lambda leaf: self._faked(leaf, fakes), value)
        held = {storage_id(t) for t in state.values()}
        written = bool(held & self._effects.storages)
        return self._outcome(value, [(n, real(t)) for n, t in named], written)

    def _pairs(
        self, zeros: dict[int, Tensor], named: Sequence[tuple[str, Tensor]]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        for _, fake in named:
            if id(fake) in zeros:
                yield fake, zeros[id(fake)]

    def _faked(self, leaf: Any, fakes: dict[int, Tensor]) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in fakes:
            return fakes[id(leaf)]
        with self._mode:
            fake = torch.empty_strided(
                leaf.size(), leaf.stride(), dtype=leaf.dtype, device=leaf.device
            )
            fake.requires_grad_(leaf.requires_grad)
            # a result is no leaf of autograd: the code may write it in place
            return fake if leaf.is_leaf else fake.clone()


@contextmanager
def _random_state_kept() -> Iterator[None]:
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = range(torch.cuda.device_count()) if initialized else ()
    with torch.random.fork_rng(devices=devices):
        yield

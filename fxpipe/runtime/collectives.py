"""What all ranks of a pipeline do together: the loss, tied parameters, norms, saved state.

Every result is made of the parts of all ranks in ascending order of rank. So its bits do not depend
on a ring's order, and ranks in one process get those that ranks in several do.

**Terms.** A rank is *held* by the process that runs it: one a process, or all of them.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from fxpipe.compat import Group
from fxpipe.errors import TransportError
from fxpipe.runtime.launch import World
from fxpipe.runtime.transport.gloo import COLLECTIVE_TAG
from fxpipe.runtime.transport.interface import first_line, wait_all


class Collectives(Protocol):
    """Each process calls these in the same order, with what the ranks it holds bring."""

    held: tuple[int, ...]

    def broadcast(self, value: Tensor, source: int) -> Tensor:
        """The value that rank `source` has.

        Args:
            value: that value on the process that holds `source`; elsewhere any tensor of its shape,
                dtype and device.
            source: rank in the pipeline.
        """
        ...

    def add(self, tensors: Mapping[int, Tensor], ranks: Sequence[int]) -> None:
        """Sums one tensor a rank over `ranks`, in place.

        Args:
            tensors: by rank, those of the ranks that are held; nobody shares memory.
            ranks: ascending; a process that holds none of them need not call.
        """
        ...

    def reduce(self, values: Mapping[int, Tensor], how: Literal["sum", "max"]) -> Tensor:
        """Sum or maximum of one 0-dim tensor a rank, over all ranks."""
        ...

    def gather(self, values: Mapping[int, object]) -> list[Any]:
        """One picklable value a rank, of all ranks; tensors on CPU."""
        ...


class LocalCollectives:
    """All ranks are held by this process."""

    def __init__(self, ranks: int) -> None:
        self.held: tuple[int, ...] = tuple(range(ranks))

    def broadcast(self, value: Tensor, source: int) -> Tensor:
        return value.detach()

    def add(self, tensors: Mapping[int, Tensor], ranks: Sequence[int]) -> None:
        _assign_sum([tensors[rank] for rank in ranks], [tensors[rank] for rank in ranks])

    def reduce(self, values: Mapping[int, Tensor], how: Literal["sum", "max"]) -> Tensor:
        return _reduced([values[rank].detach() for rank in self.held], how)

    def gather(self, values: Mapping[int, object]) -> list[Any]:
        return [values[rank] for rank in self.held]


class WorldCollectives:
    """This process holds one rank; tensors on CUDA travel over NCCL, all others over gloo."""

    def __init__(self, world: World) -> None:
        self.held: tuple[int, ...] = (world.rank,)
        self._world, self._all = world, tuple(range(world.size))
        self._nccl: dict[tuple[int, ...], Group] = {}

    def broadcast(self, value: Tensor, source: int) -> Tensor:
        value = value.detach()
        if value.device.type == "cuda":
            return self._gather(value, self._all)[source]
        control, value = self._world.control, value.contiguous()
        if self._world.rank == source:
            others = [peer for peer in self._all if peer != source]
            wait_all([control.send([value], peer, COLLECTIVE_TAG) for peer in others])
            return value
        found = torch.empty_like(value)
        wait_all([control.recv([found], source, COLLECTIVE_TAG)])
        return found

    def add(self, tensors: Mapping[int, Tensor], ranks: Sequence[int]) -> None:
        if self._world.rank in ranks:
            mine = tensors[self._world.rank]
            _assign_sum([mine], self._gather(mine, tuple(ranks)))

    def reduce(self, values: Mapping[int, Tensor], how: Literal["sum", "max"]) -> Tensor:
        return _reduced(self._gather(values[self._world.rank].detach(), self._all), how)

    def gather(self, values: Mapping[int, object]) -> list[Any]:
        mine = torch.frombuffer(
            bytearray(pickle.dumps(values[self._world.rank])), dtype=torch.uint8
        )
        lengths = self._gather(torch.tensor(len(mine)), self._all)
        parts = [torch.empty(int(length), dtype=torch.uint8) for length in lengths]
        self._exchange(mine, dict(enumerate(parts)))
        return [pickle.loads(part.numpy().tobytes()) for part in parts]

    def _gather(self, mine: Tensor, ranks: tuple[int, ...]) -> list[Tensor]:
        """The tensor of each of `ranks`, this one's included; all of one shape and dtype."""
        if len(ranks) == 1:
            return [mine.clone()]
        parts = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in ranks]
        if mine.device.type == "cuda":
            # as bytes: NCCL knows neither complex nor 16-bit integer types
            views = [part.view(-1).view(torch.uint8) for part in parts]
            self._nccl_gather(mine.contiguous().view(-1).view(torch.uint8), views, ranks)
        else:
            self._exchange(mine.contiguous(), dict(zip(ranks, parts, strict=True)))
        return parts

    def _exchange(self, mine: Tensor, parts: Mapping[int, Tensor]) -> None:
        """Sends `mine` to every rank in `parts`, and receives theirs there."""
        control, rank = self._world.control, self._world.rank
        peers = [peer for peer in parts if peer != rank]
        works = [control.recv([parts[peer]], peer, COLLECTIVE_TAG) for peer in peers]
        works += [control.send([mine], peer, COLLECTIVE_TAG) for peer in peers]
        parts[rank].copy_(mine)
        wait_all(works)

    def _nccl_gather(self, mine: Tensor, parts: list[Tensor], ranks: tuple[int, ...]) -> None:
        assert self._world.nccl is not None  # the world's tensors are on its device
        groups, _ = self._world.nccl
        if ranks not in self._nccl:
            name = "gather-" + "-".join(map(str, ranks))
            self._nccl[ranks] = groups.open(name, ranks.index(self._world.rank), len(ranks))
        try:
            self._nccl[ranks].allgather([parts], [mine]).wait()
        except RuntimeError as error:
            raise TransportError(f"a collective failed: {first_line(error)}") from error


def make_collectives(world: World | None, ranks: int) -> Collectives:
    """Those of `world`, or those of `ranks` ranks in this process."""
    return LocalCollectives(ranks) if world is None else WorldCollectives(world)


def _reduced(parts: Sequence[Tensor], how: Literal["sum", "max"]) -> Tensor:
    return functools.reduce(torch.add if how == "sum" else torch.maximum, parts)


def _assign_sum(targets: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    with torch.no_grad():
        total = functools.reduce(torch.add, parts)
        for target in targets:
            target.copy_(total)

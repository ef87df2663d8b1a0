"""Transfers between CUDA devices: one communicator per (source, target, direction) in use.

NCCL pairs messages by order and ignores tags, and a transfer may block until its peer has posted
the other end. So each kind of message between two ranks gets a queue of its own: of the layouts
tried in a rendezvous dry run of 1F1B, interleaved, zero-bubble and ZBV orders, only this one never
deadlocked.

A transfer with a peer that has died does not fail, it never ends. So every rank has a `Lifeline`.

**Terms.** A *link* is ``(source, target, direction)``, ranks in the pipeline, direction 0 for
activations and 1 for gradients. *Control* is the gloo transport of the same ranks.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from fxpipe.compat import Group
from fxpipe.errors import TransportError
from fxpipe.runtime.transport.gloo import LIFELINE_TAG, GlooTransport
from fxpipe.runtime.transport.interface import Work, first_line

log = logging.getLogger(__name__)

Link = tuple[int, int, int]


class Groups(Protocol):
    """Makes groups, and ends all of those it made."""

    def open(self, name: str, rank: int, size: int) -> Group:
        """A group; its ranks call this with the same name, in the same order of names."""
        ...

    def abort(self) -> None: ...
    def close(self) -> None: ...


class NcclGroups:
    """NCCL groups on one device, made by their ranks alone, outside of torch's registry."""

    def __init__(self, store: Store, device: torch.device) -> None:
        self._store, self._device = store, device
        self._groups: list[Group] = []

    def open(self, name: str, rank: int, size: int) -> Group:
        make = dist.ProcessGroupNCCL
        store = PrefixStore(name, self._store)
        group = cast(Group, make(store, rank, size, make.Options()))
        self._groups.append(group)
        return group

    def abort(self) -> None:
        # In a thread each: aborts of communicators that share a device can wait for one another
        # (pytorch #119797), and the caller has an error to raise.
        threads = [threading.Thread(target=g.abort, daemon=True) for g in self._groups]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 3.0
        for thread in threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        while self._groups:
            self._groups.pop(0).shutdown()


class Lifeline:
    """A thread that notices when the next rank in a ring ends without `close`, and says so once.

    It waits for a message that the next rank sends when it closes. A rank that dies or aborts
    breaks its connections instead, so the rank before it aborts, and so on around the ring.

    Args:
        control: aborted together with the lifeline.
        on_loss: called from the thread.
    """

    def __init__(self, control: GlooTransport, on_loss: Callable[[], None]) -> None:
        self._control, self._on_loss = control, on_loss
        self._is_over = False
        self._before = (control.rank - 1) % control.size
        after = (control.rank + 1) % control.size
        farewell = control.recv([torch.empty(1)], after, LIFELINE_TAG)
        self._thread = threading.Thread(
            target=self._watch, args=(farewell,), name="fxpipe-lifeline", daemon=True
        )
        self._thread.start()

    def _watch(self, farewell: Work) -> None:
        try:
            cast(dist.Work, farewell).wait(timedelta(days=365))
        except RuntimeError as error:
            if not self._is_over:
                log.debug("lifeline broken rank=%d error=%s", self._control.rank, error)
                self._on_loss()

    def cut(self) -> None:
        """Breaks the connections to all peers, without a call of `on_loss` here."""
        self._is_over = True
        self._control.abort()

    def close(self) -> None:
        """Tells the rank before that this one leaves in good order, then ends the thread.

        A thread that is still waiting when the interpreter ends can bring the process down.
        """
        self._is_over = True
        try:
            farewell = self._control.send([torch.empty(1)], self._before, LIFELINE_TAG)
            cast(dist.Work, farewell).wait(timedelta(seconds=2))
        except (RuntimeError, TransportError) as error:
            log.debug("no farewell rank=%d error=%s", self._control.rank, error)
        self._control.abort()
        self._thread.join(timeout=2.0)


class NcclTransport:
    """Sends over one two-rank group a link.

    Args:
        control: connects the same ranks, two or more.
        groups: makes the groups; all of its groups are aborted with the transport.
        device: where tensors are.
        on_loss: called once, from another thread, when a peer is gone, before the groups are
            aborted; with the peers that are.
    """

    def __init__(
        self,
        control: GlooTransport,
        groups: Groups,
        *,
        device: torch.device,
        on_loss: Callable[[tuple[int, ...]], None],
    ) -> None:
        self.rank, self.size = control.rank, control.size
        self.is_broken = False
        self._control, self._groups = control, groups
        self._device, self._on_loss = device, on_loss
        self._opened: set[Link] = set()
        self._sends: dict[tuple[int, int], Group] = {}  # by peer and direction
        self._receives: dict[tuple[int, int], Group] = {}
        self._lifeline = Lifeline(control, self._lose)
        atexit.register(self._end_with_process)

    def open(self, links: Iterable[Link]) -> None:
        """Makes the groups of links that have none.

        Every rank is given the links of the whole pipeline. It opens its own in one sorted order,
        and sends a message through each: NCCL connects at the first message, and ranks that connect
        in different orders deadlock.
        """
        probe = torch.zeros(1, dtype=torch.uint8, device=self._device)
        links = set(links) - self._opened
        self._opened |= links
        for source, target, direction in sorted(links):
            name = f"{source}-{target}-{direction}"
            if self.rank == source:
                group = self._sends[target, direction] = self._groups.open(name, 0, 2)
                group.send([probe], 1, 0).wait()
            elif self.rank == target:
                group = self._receives[source, direction] = self._groups.open(name, 1, 2)
                group.recv([probe], 0, 0).wait()

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Work:
        send = self._sends[peer, tag & 1].send
        try:
            return _Work(self, [send([_as_bytes(t)], 1, 0) for t in tensors if t.numel()])
        except RuntimeError as error:
            raise TransportError(f"cannot send to rank {peer}: {first_line(error)}") from error

    def recv(self, buffers: Sequence[Tensor], peer: int, tag: int) -> Work:
        recv = self._receives[peer, tag & 1].recv
        try:
            return _Work(self, [recv([_as_bytes(b)], 0, 0) for b in buffers if b.numel()])
        except RuntimeError as error:
            raise TransportError(f"cannot receive from rank {peer}: {first_line(error)}") from error

    def lost(self) -> tuple[int, ...]:
        return self._control.lost()

    def abort(self) -> None:
        if self.is_broken:
            return
        self.is_broken = True
        atexit.unregister(self._end_with_process)
        self._groups.abort()
        self._lifeline.cut()

    def close(self) -> None:
        if self.is_broken:
            return
        self.is_broken = True
        atexit.unregister(self._end_with_process)
        self._groups.close()
        self._lifeline.close()

    def _lose(self) -> None:
        self._on_loss(self._control.lost())
        self.abort()

    def _end_with_process(self) -> None:
        # An exception that nobody caught has been printed by now: peers must not take this end of
        # the process for one in good order, they would wait in their next step.
        if hasattr(sys, "last_value"):
            self.abort()
        else:
            self.close()


class _Work:
    """Transfers of one message. A wait lets the stream wait, so after an abort it must raise."""

    __slots__ = ("_transport", "_works")

    def __init__(self, transport: NcclTransport, works: Sequence[Work]) -> None:
        self._transport, self._works = transport, works

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        if self._transport.is_broken:
            raise TransportError("the connection was aborted after a rank had failed")

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor; NCCL knows neither complex nor 16-bit integer types."""
    return tensor.detach().reshape(-1).view(torch.uint8)

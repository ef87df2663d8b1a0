"""Transfers between processes on CPU, over a gloo group that belongs to one pipeline.

What torch 2.13.0 and 2.14.1 do, found by experiment; the code below rests on it:

- The backend object is called directly. A message sent through ``dist`` or a registered
  ``ProcessGroup`` costs 180 us of CPU on the sender, one sent through the backend 56 us.
- A send is done only when the peer has posted its receive, whatever the size: rendezvous.
- ``is_completed`` is False until ``wait`` has returned, even if the message has arrived.
- A message longer than its buffer ends the receiving process, a shorter one is accepted.
- When a peer's process ends, for any reason, a transfer with it raises `RuntimeError` within
  milliseconds, one that is waited for already included. Other connections are not affected.
- ``destroy_process_group``, ``shutdown`` and ``abort`` close nothing: peers wait on for 30 minutes.
  The connections close with the last reference to the group, and the frames of a traceback hold
  some. But a ``wait`` that times out closes all connections of its group at once, whatever refers
  to it. Hence `GlooTransport.abort`: it waits a millisecond for what is never sent.
- A connection is locked while a transfer is posted, for as long as the kernel takes to send its
  first bytes. The thread that reads what peers send does not sleep on that lock: it polls, and
  burns 50 us of CPU and more. With one connection for activations and one for gradients it rarely
  meets the lock, since what arrives as the one is sent comes over the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from fxpipe.compat import Group
from fxpipe.errors import TransportError
from fxpipe.runtime.transport.interface import Work, first_line, wait_all

# Tags of edges count from 0; gloo's are 32 bits wide.
COLLECTIVE_TAG: Final = 1 << 30
LIFELINE_TAG: Final = COLLECTIVE_TAG + 1
_NEVER_SENT_TAG: Final = COLLECTIVE_TAG + 2


class GlooTransport:
    """Sends over groups whose ranks are those of the pipeline.

    Args:
        group: carries activations, which have even tags.
        gradients: carries gradients, which have odd tags; None: `group` does.
    """

    def __init__(self, group: Group, gradients: Group | None = None) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.group = group
        self._gradients = gradients or group
        self._sends = (group.send, self._gradients.send)  # by direction
        self._recvs = (group.recv, self._gradients.recv)
        self._nothing = torch.empty(1)

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Work:
        send = self._sends[tag % 2]
        try:
            if len(tensors) == 1:
                return send(tensors, peer, tag)
            return _Works([send([tensor], peer, tag) for tensor in tensors])
        except RuntimeError as error:
            raise _failed("send to", peer, error) from error

    def recv(self, buffers: Sequence[Tensor], peer: int, tag: int) -> Work:
        recv = self._recvs[tag % 2]
        try:
            if len(buffers) == 1:
                return recv(buffers, peer, tag)
            return _Works([recv([buffer], peer, tag) for buffer in buffers])
        except RuntimeError as error:
            raise _failed("receive from", peer, error) from error

    def lost(self) -> tuple[int, ...]:
        # the end of a process is seen on one of its connections before the other
        groups = (self.group, self._gradients)
        return tuple(
            peer
            for peer in self._peers()
            if any(self._expect_nothing(group, peer) is None for group in groups)
        )

    def abort(self) -> None:
        self._abort(self.group)
        if self._gradients is not self.group:
            self._abort(self._gradients)

    def _abort(self, group: Group) -> None:
        for peer in self._peers():
            if (work := self._expect_nothing(group, peer)) is not None:
                try:
                    work.wait(timedelta(milliseconds=1))
                except RuntimeError:
                    return  # it timed out, and all connections of the group are closed

    def close(self) -> None:
        # Data that peers have yet to read is on its way: aborting could overtake it. The sockets
        # close with the last reference.
        self._sends = self._recvs = (_refuse, _refuse)

    def _peers(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.rank]

    def _expect_nothing(self, group: Group, peer: int) -> dist.Work | None:
        """Posts a receive that stays unanswered; None if the connection is broken."""
        try:
            return group.recv([self._nothing], peer, _NEVER_SENT_TAG)
        except RuntimeError:
            return None


class _Works:
    """Several transfers that are waited for as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        wait_all(self._works)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _refuse(tensors: Sequence[Tensor], peer: int, tag: int, /) -> dist.Work:
    raise TransportError("the pipeline is closed")


def _failed(doing: str, peer: int, error: RuntimeError) -> TransportError:
    return TransportError(f"cannot {doing} rank {peer}: {first_line(error)}")

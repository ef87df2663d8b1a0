"""All ranks in one thread: messages wait in queues, and nothing ever blocks."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fxpipe.errors import TransportError


class _Key(NamedTuple):
    """One queue: messages of a source for a target under a tag pair by order."""

    source: int
    target: int
    tag: int

    def __str__(self) -> str:
        return f"edge {self.tag // 2}, {'gradients' if self.tag % 2 else 'activations'}"


class _Work:
    """One end of a message, until the other end is there too."""

    __slots__ = ("done", "key", "sends", "tensors")

    def __init__(self, tensors: Sequence[Tensor], key: _Key, *, sends: bool, done: bool) -> None:
        self.tensors, self.key, self.sends, self.done = tensors, key, sends, done

    def is_completed(self) -> bool:
        return self.done

    def wait(self) -> None:
        """Returns if the message has been moved; it cannot become so while this thread waits.

        Raises:
            TransportError: the other end has not been posted.
        """
        if self.done:
            return
        source, target, _ = self.key
        problem = (
            f"rank {source} waits for rank {target} to take a message that it never asked for"
            if self.sends
            else f"rank {target} waits for a message that rank {source} never sent"
        )
        raise TransportError(problem, at=str(self.key))


class LocalNetwork:
    """Joins `ranks` ports in one thread.

    Args:
        ranks: P.
        rendezvous: a send is completed only when its receive is posted, NCCL's worst case. Else at
            once.
    """

    def __init__(self, ranks: int, *, rendezvous: bool = False) -> None:
        self.size, self.rendezvous = ranks, rendezvous
        self._waiting: defaultdict[_Key, deque[_Work]] = defaultdict(deque)

    def port(self, rank: int) -> LocalTransport:
        """The end of one rank."""
        return LocalTransport(self, rank)

    def post(self, work: _Work) -> None:
        """Pairs `work` with the oldest of the other kind, or queues it."""
        waiting = self._waiting[work.key]
        # A queue holds only sends or only receives: a second kind would have been paired.
        if not waiting or waiting[0].sends == work.sends:
            waiting.append(work)
        elif work.sends:
            _move(work, waiting.popleft())
        else:
            _move(waiting.popleft(), work)

    def clear(self) -> None:
        """Forgets every message under way: a step that failed leaves nothing to the next."""
        self._waiting.clear()


class LocalTransport:
    """One rank's end of a `LocalNetwork`."""

    def __init__(self, network: LocalNetwork, rank: int) -> None:
        self.rank, self.size = rank, network.size
        self._network = network

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> _Work:
        done = not self._network.rendezvous
        work = _Work(tensors, _Key(self.rank, peer, tag), sends=True, done=done)
        self._network.post(work)
        return work

    def recv(self, buffers: Sequence[Tensor], peer: int, tag: int) -> _Work:
        work = _Work(buffers, _Key(peer, self.rank, tag), sends=False, done=False)
        self._network.post(work)
        return work

    def lost(self) -> tuple[int, ...]:
        return ()

    def abort(self) -> None:
        self._network.clear()

    def close(self) -> None:
        self._network.clear()


def _move(sent: _Work, received: _Work) -> None:
    """Copies a message into its buffers: the receiver may write to them, the sender's stay as sent.

    Raises:
        TransportError: shapes or dtypes differ. `copy_` would broadcast and convert without a word.
    """
    have = [(t.dtype, tuple(t.shape)) for t in sent.tensors]
    want = [(t.dtype, tuple(t.shape)) for t in received.tensors]
    if have != want:
        source, target, _ = sent.key
        raise TransportError(
            f"rank {source} sends {have}, but rank {target} expects {want}", at=str(sent.key)
        )
    with torch.no_grad():
        for buffer, tensor in zip(received.tensors, sent.tensors, strict=True):
            buffer.copy_(tensor)
    sent.tensors, received.tensors = (), ()
    sent.done = received.done = True

"""What carries tensors between ranks: the interface of every transport.

**Terms.** A *tag* is ``2 * edge + direction``, direction 0 for activations and 1 for gradients.
Messages between two ranks under one tag arrive in the order in which they were sent; messages under
different tags may overtake each other, or may not (NCCL has one order a direction).

**Signatures.** ``send(tensors, peer, tag) -> Work``, ``recv(buffers, peer, tag) -> Work``; neither
blocks. Tensors are detached and contiguous, nobody writes to them before the work is done, and the
buffers at the other end have the same shapes and dtypes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from fxpipe.errors import TransportError


class Work(Protocol):
    """A transfer under way. It keeps its tensors alive."""

    def wait(self) -> object:
        """Returns when a received tensor may be read, or a sent one overwritten.

        On CUDA that holds for the current stream: the host does not wait. A send may be done only
        when the peer has posted its receive.
        """
        ...

    def is_completed(self) -> bool:
        """Whether `wait` would return at once. False may also mean "not known"."""
        ...


class Transport(Protocol):
    """One rank's end of a transport. Ranks are places in the pipeline, 0..P-1."""

    rank: int
    size: int

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Work:
        """Starts to send one message."""
        ...

    def recv(self, buffers: Sequence[Tensor], peer: int, tag: int) -> Work:
        """Starts to receive one message."""
        ...

    def lost(self) -> tuple[int, ...]:
        """Peers whose connection is broken. Asked only before `abort`: receives stay behind."""
        ...

    def abort(self) -> None:
        """Makes every transfer under way fail, here and at the peers."""
        ...

    def close(self) -> None:
        """Frees what the transport holds. All transfers of this rank are done by then."""
        ...


def wait_all(works: Iterable[Work]) -> None:
    """Waits for each transfer.

    Raises:
        TransportError: one failed; `RuntimeError` from inside a transport means nothing else.
    """
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        raise TransportError(f"a transfer failed: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """What went wrong, without the pages that c10 appends to it."""
    return next(iter(str(error).splitlines()), "")

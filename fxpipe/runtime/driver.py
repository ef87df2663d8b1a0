"""Runs the ranks of a pipeline that are in this process: all, or the one torchrun started."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn, Protocol

import torch

from fxpipe.errors import RankError
from fxpipe.runtime.collectives import Collectives, make_collectives
from fxpipe.runtime.executor import Executor, run_cooperatively
from fxpipe.runtime.failure import explain, fail
from fxpipe.runtime.launch import World, join_world
from fxpipe.runtime.transport.interface import Transport
from fxpipe.runtime.transport.local import LocalNetwork
from fxpipe.runtime.transport.nccl import Link

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Driver(Protocol):
    """The ranks of this process and what joins them to the others.

    ``is_whole``: no other process takes part.
    """

    ranks: tuple[int, ...]
    is_whole: bool
    device: torch.device
    collectives: Collectives

    def connect(self, links: Sequence[Link]) -> None:
        """Opens what the links of a program need; every process calls it with the same links."""
        ...

    def transport(self, rank: int) -> Transport:
        """The end of one rank of this process."""
        ...

    def agree(self, digest: str, what: str) -> None:
        """Checks that every rank has the same digest.

        Raises:
            RankError: one has another; the ranks are named.
        """
        ...

    def run(self, executors: Sequence[Executor]) -> None:
        """Runs one step of each rank of this process.

        Raises:
            RankError: a rank failed, here or elsewhere.
        """
        ...

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Surrounds what all ranks do together outside of a program.

        Raises:
            RankError: a rank failed inside, here or elsewhere.
        """
        ...


class LocalDriver:
    """All ranks in this thread.

    Args:
        ranks: P.
        device: where they compute.
        rendezvous: sends finish only when their receive is posted.
    """

    def __init__(self, ranks: int, device: torch.device, *, rendezvous: bool = False) -> None:
        self.ranks: tuple[int, ...] = tuple(range(ranks))
        self.is_whole = True
        self.device = device
        self.collectives: Collectives = make_collectives(None, ranks)
        self._network = LocalNetwork(ranks, rendezvous=rendezvous)

    def connect(self, links: Sequence[Link]) -> None:
        """Nothing to open: messages wait in queues."""

    def transport(self, rank: int) -> Transport:
        return self._network.port(rank)

    def agree(self, digest: str, what: str) -> None:
        """One process agrees with itself."""

    def together(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def run(self, executors: Sequence[Executor]) -> None:
        running: list[Executor] = []
        try:
            run_cooperatively(executors, running)
        except Exception as error:
            for executor in executors:
                executor.drop()
            if not running:
                raise
            failed = running[-1]
            fail(error, _told(error, failed, failed.rank), transport=self.transport(failed.rank))


class DistributedDriver:
    """One rank, in a process of its own."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.ranks: tuple[int, ...] = (world.rank,)
        self.is_whole = False
        self.device = world.device
        self.collectives: Collectives = make_collectives(world, world.size)
        self._transport: Transport = world.control

    def connect(self, links: Sequence[Link]) -> None:
        with self.together():
            self._transport = self._world.open_transport(links)

    def transport(self, rank: int) -> Transport:
        return self._transport

    def agree(self, digest: str, what: str) -> None:
        with self.together():
            digests = self.collectives.gather({self._world.rank: digest})
        other = [r for r, d in enumerate(digests) if d != digests[0]]
        if other:
            names = ", ".join(str(self._world.ranks[r]) for r in other)
            raise RankError(
                f"rank {self._world.ranks[0]} and ranks {names} compiled different {what}",
                hint="every rank must make the same calls, with the same model, options and batch; "
                "seed alike before building the model",
            )

    def run(self, executors: Sequence[Executor]) -> None:
        (executor,) = executors
        try:
            executor.run()
        except BaseException as error:
            executor.drop()
            self._fail(error, _told(error, executor, self._here))

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        try:
            yield
        except RankError:
            raise
        except BaseException as error:
            self._fail(error, explain(error, rank=self._here))

    @property
    def _here(self) -> int:
        """This rank's number in the world, as launchers print it."""
        return self._world.ranks[self._world.rank]

    def _fail(self, error: BaseException, told: RankError) -> NoReturn:
        fail(
            error,
            told,
            transport=self._transport,
            board=self._world.board,
            ranks=self._world.ranks,
        )


def make_driver(
    transport: str, ranks: int, mesh: DeviceMesh | None, device: torch.device
) -> Driver:
    """Joins the other processes of the pipeline, if there are any.

    Args:
        transport: as the option of ``compile``.
        ranks: P.
        mesh: as the option of ``compile``.
        device: where the model is, for ranks in one process.
    """
    world = join_world(ranks, transport=transport, mesh=mesh)
    return LocalDriver(ranks, device) if world is None else DistributedDriver(world)


def _told(error: BaseException, executor: Executor, rank: int) -> RankError:
    """The error with the action, the module and the user's line that it came from."""
    action = executor.current
    if action is None:
        return explain(error, rank=rank)
    module, _, source = executor.origin_of(error).partition(", ")
    return explain(
        error,
        rank=rank,
        action=str(action),
        stage=action.stage,
        microbatch=action.microbatch,
        module=module,
        source=source,
    )

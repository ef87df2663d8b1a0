"""Which process this is: finds the ranks of the pipeline, their device, and opens their transport.

**Terms.** The *world* is all processes of the job. A pipeline spans all of them, or one line of a
mesh along its ``pp`` dimension; several pipelines then run side by side.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore

from fxpipe import compat
from fxpipe.errors import OptionError
from fxpipe.runtime.failure import Board, explain, fail, report_loss
from fxpipe.runtime.transport.gloo import GlooTransport
from fxpipe.runtime.transport.interface import Transport
from fxpipe.runtime.transport.nccl import Link, NcclGroups, NcclTransport


@dataclasses.dataclass(frozen=True)
class World:
    """The processes of one pipeline, as one of them sees it.

    Args:
        rank: place in the pipeline, 0..P-1.
        ranks: rank in the world of each place.
        device: where this process computes.
        process_group: torch's group of these ranks, for what torch.distributed does.
        control: connects these ranks alone, on CPU.
        board: where they post the first error.
        nccl: groups among them and the transport over these; None on CPU.
    """

    rank: int
    ranks: tuple[int, ...]
    device: torch.device
    process_group: dist.ProcessGroup
    control: GlooTransport
    board: Board
    nccl: tuple[NcclGroups, NcclTransport] | None

    @property
    def size(self) -> int:
        """P."""
        return len(self.ranks)

    def open_transport(self, links: Iterable[Link]) -> Transport:
        """Connects the ranks; each of them calls this with the links of the whole pipeline.

        Raises:
            RankError: a rank failed, which ends the others too.
        """
        if self.nccl is None:
            return self.control
        _, transport = self.nccl
        try:
            transport.open(links)
        except Exception as error:
            told = explain(error, rank=self.ranks[self.rank], action="connecting the ranks")
            fail(error, told, transport=transport, board=self.board, ranks=self.ranks)
        return transport


def is_distributed() -> bool:
    """Whether the job has several processes: torchrun says so, or the default group does."""
    if dist.is_initialized():
        return dist.get_world_size() > 1
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def join_world(
    size: int, *, transport: str = "auto", mesh: DeviceMesh | None = None
) -> World | None:
    """Joins the other ranks of the pipeline; each of them makes the same calls in the same order.

    Args:
        size: P.
        transport: as the option of ``compile``; "auto" is distributed where the job has several
            processes, then NCCL where there are CUDA devices.
        mesh: has a "pp" dimension; None: the pipeline spans the world.

    Returns:
        None if all ranks run in this process.

    Raises:
        OptionError: the processes there are do not make such a pipeline.
    """
    if transport == "nccl" and not torch.cuda.is_available():
        raise OptionError("transport 'nccl' needs CUDA devices, and there are none")
    if transport == "local" or (transport == "auto" and not is_distributed()):
        return None
    if not is_distributed():
        raise OptionError(
            f"transport {transport!r} needs several processes, but this is the only one",
            hint=f"torchrun --nproc-per-node {size}, or transport='local'",
        )
    on_cuda = transport != "gloo" and torch.cuda.is_available()
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_cuda else "gloo")
    if mesh is not None:
        on_cuda = on_cuda and mesh.device_type == "cuda"
    elif transport == "auto":  # the default group may be the user's
        on_cuda = on_cuda and "nccl" in dist.get_backend_config()
    group = _pipeline_group(size, mesh)
    return _join(group, _device() if on_cuda else torch.device("cpu"))


def _pipeline_group(size: int, mesh: DeviceMesh | None) -> dist.ProcessGroup:
    if mesh is None:
        group = dist.group.WORLD
        assert group is not None  # it was initialised by the caller
        found, where = group.size(), "the world has"
    else:
        names = mesh.mesh_dim_names or ()
        if "pp" not in names:
            raise OptionError(
                f"the mesh has no dimension 'pp', its dimensions are {names}",
                hint="init_device_mesh(..., mesh_dim_names=('dp', 'pp'))",
            )
        group = mesh.get_group("pp")
        found, where = group.size(), "dimension 'pp' of the mesh has"
    if found != size:
        raise OptionError(
            f"the pipeline has {size} ranks, but {where} {found} processes",
            at=f"stages / chunks = {size}",
            hint=f"use stages = {found} * chunks, or start {size} processes a pipeline",
        )
    return group


def _device() -> torch.device:
    default = dist.get_rank() % torch.cuda.device_count()
    index = int(os.environ.get("LOCAL_RANK", default))
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _join(group: dist.ProcessGroup, device: torch.device) -> World:
    world = dist.group.WORLD
    assert world is not None
    ranks = tuple(dist.get_process_group_ranks(group))
    rank = group.rank()
    # Every pipeline has keys of its own, counted in the store: else it would read the addresses and
    # the error that an earlier one has left there.
    pipelines = PrefixStore(f"fxpipe/{'-'.join(map(str, ranks))}", world.get_group_store())
    number = pipelines.add(f"opened-by-{rank}", 1)
    store = PrefixStore(str(number), pipelines)
    device_of_both = compat.gloo_device()
    activations, gradients = (
        compat.gloo_group(PrefixStore(name, store), rank, len(ranks), device_of_both)
        for name in ("control", "gradients")
    )
    control = GlooTransport(activations, gradients)
    board = Board(store)

    def on_loss(lost: tuple[int, ...]) -> None:
        report_loss(board, [ranks[r] for r in lost], seen_by=ranks[rank])

    nccl = None
    if device.type == "cuda" and len(ranks) > 1:
        groups = NcclGroups(PrefixStore("nccl", store), device)
        nccl = groups, NcclTransport(control, groups, device=device, on_loss=on_loss)
    return World(rank, ranks, device, group, control, board, nccl)

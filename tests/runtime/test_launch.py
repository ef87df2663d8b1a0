"""Which processes make a pipeline, and what is said when they do not."""

import os
import socket

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fxpipe.errors import OptionError
from fxpipe.runtime.launch import is_distributed, join_world
from fxpipe.runtime.transport.interface import wait_all
from tests.ranks import run_ranks


def exchange(transport):
    """What a rank of two receives from the other: its place in the pipeline."""
    buffer, peer = torch.zeros(1), 1 - transport.rank
    works = [transport.recv([buffer], peer, 0)]
    wait_all([*works, transport.send([torch.tensor([float(transport.rank)])], peer, 0)])
    return buffer.item()


def test_without_torchrun_all_ranks_run_in_this_process():
    assert not is_distributed()
    assert join_world(4) is None
    assert not dist.is_initialized()


def test_local_is_local_under_torchrun_too(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert is_distributed()
    assert join_world(4, transport="local") is None


def test_one_process_under_torchrun_is_no_distributed_job(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert join_world(1) is None


def test_a_distributed_transport_in_one_process_says_how_to_start_several():
    with pytest.raises(OptionError, match="'gloo' needs several processes") as caught:
        join_world(4, transport="gloo")
    assert "torchrun --nproc-per-node 4" in caught.value.hint


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are CUDA devices")
def test_nccl_without_devices_is_refused():
    with pytest.raises(OptionError, match="needs CUDA devices"):
        join_world(2, transport="nccl")


def test_torchruns_environment_is_enough():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])

    def rank_main(rank):
        os.environ.update(
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            WORLD_SIZE="2",
            RANK=str(rank),
            LOCAL_RANK="0",
        )
        world = join_world(2)
        received = exchange(world.open_transport([(0, 1, 0)]))
        return world.rank, world.size, world.ranks, str(world.device), received

    assert run_ranks(2, rank_main, init=False) == [
        (0, 2, (0, 1), "cpu", 1.0),
        (1, 2, (0, 1), "cpu", 0.0),
    ]


def test_pipelines_run_side_by_side_on_the_lines_of_a_mesh():
    def rank_main(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        world = join_world(2, mesh=mesh)
        group = dist.get_process_group_ranks(world.process_group)
        return world.rank, world.ranks, group, exchange(world.open_transport([]))

    found = run_ranks(4, rank_main)
    assert [rank for rank, *_ in found] == [0, 0, 1, 1]
    assert [ranks for _, ranks, *_ in found] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [tuple(group) for *_, group, _ in found] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [received for *_, received in found] == [1, 1, 0, 0]


def test_a_second_pipeline_shares_nothing_with_the_first_even_if_that_has_failed():
    def rank_main(rank):
        first = join_world(2)
        first.board.report("an error of the first pipeline")
        dist.barrier()
        first.control.abort()
        second = join_world(2)
        return second.board.first(), exchange(second.control)

    assert run_ranks(2, rank_main) == [(None, 1.0), (None, 0.0)]


def test_more_ranks_than_processes_is_refused_with_both_numbers():
    def rank_main(rank):
        with pytest.raises(OptionError) as caught:
            join_world(3)
        return str(caught.value)

    assert run_ranks(2, rank_main)[0].startswith(
        "the pipeline has 3 ranks, but the world has 2 processes\n"
    )


def test_a_mesh_without_the_dimension_is_refused_with_those_it_has():
    def rank_main(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        with pytest.raises(OptionError) as caught:
            join_world(2, mesh=mesh)
        return caught.value.problem

    assert run_ranks(2, rank_main)[0] == (
        "the mesh has no dimension 'pp', its dimensions are ('dp',)"
    )


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (lambda: 1 / 0, "rank 1 ended with ZeroDivisionError\nTraceback"),
        (lambda: os._exit(3), "rank 1 ended with 3\n"),
    ],
)
def test_run_ranks_shows_how_a_rank_ended_that_should_not_have(end, message):
    with pytest.raises(AssertionError, match=message):
        run_ranks(2, lambda rank: rank and end())


def test_run_ranks_names_the_ranks_that_hang():
    with pytest.raises(TimeoutError, match=r"ranks \[1\] of 3 still run after 0.5 s"):
        run_ranks(
            3, lambda rank: rank == 1 and torch.futures.Future().wait(), timeout_s=0.5, init=False
        )

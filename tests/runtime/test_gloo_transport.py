"""Transfers between forked processes; NCCL's routing is run on gloo groups too."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from fxpipe import compat
from fxpipe.errors import TransportError
from fxpipe.runtime.transport.gloo import GlooTransport
from fxpipe.runtime.transport.interface import wait_all
from fxpipe.runtime.transport.nccl import NcclTransport
from tests.ranks import run_ranks


def group(name, rank, size):
    store = PrefixStore(name, dist.group.WORLD.get_group_store())
    return compat.gloo_group(store, rank, size)


def transport(rank, size):
    return GlooTransport(group("pipeline", rank, size))


MESSAGES = [
    torch.tensor([True, False]),
    torch.tensor([1 + 2j]),
    torch.arange(3, dtype=torch.int16),
    torch.ones(2, 3, dtype=torch.bfloat16),
    torch.empty(0, 4),
    torch.tensor(3.5),
]


def test_any_dtype_arrives_in_order_and_several_tensors_are_one_message():
    def rank_main(rank):
        ends = transport(rank, 2)
        if rank == 0:
            wait_all([ends.send([m], 1, 4) for m in MESSAGES] + [ends.send(MESSAGES, 1, 7)])
            return None
        single = [torch.zeros_like(m) for m in MESSAGES]
        together = [torch.zeros_like(m) for m in MESSAGES]
        last = ends.recv(together, 0, 7)
        wait_all(reversed([ends.recv([b], 0, 4) for b in single]))
        last.wait()
        return [torch.equal(m, b) for m, b in zip(MESSAGES * 2, single + together, strict=True)]

    assert all(run_ranks(2, rank_main)[1])


def test_peers_are_places_in_the_pipeline_not_ranks_in_the_world():
    def rank_main(rank):
        if rank == 1:
            return None
        ends = GlooTransport(group("0-2", rank // 2, 2))
        buffer = torch.zeros(1)
        works = [ends.recv([buffer], 1 - ends.rank, 0)]
        works.append(ends.send([torch.tensor([float(rank)])], 1 - ends.rank, 0))
        wait_all(works)
        return buffer.item()

    assert run_ranks(3, rank_main) == [2.0, None, 0.0]


def test_a_work_is_completed_only_after_its_wait_and_a_send_only_after_its_receive():
    # what the executor may rely on; a new torch that behaves otherwise should be noticed
    def rank_main(rank):
        ends = transport(rank, 2)
        if rank == 0:
            work = ends.send([torch.ones(1)], 1, 0)
            started = time.monotonic()
            work.wait()
            return time.monotonic() - started
        time.sleep(0.3)
        work = ends.recv([torch.zeros(1)], 0, 0)
        time.sleep(0.1)
        before = work.is_completed()
        work.wait()
        return before, work.is_completed()

    waited_s, completed = run_ranks(2, rank_main)
    assert waited_s > 0.2
    assert completed == (False, True)


def test_an_abort_releases_peers_blocked_in_a_receive_and_in_a_send_while_the_process_lives():
    def rank_main(rank):
        ends = transport(rank, 3)
        if rank == 0:
            time.sleep(0.2)
            under_way = ends.recv([torch.zeros(1)], 1, 2)  # and a reference that outlives the abort
            ends.abort()
            time.sleep(1.0)
            with pytest.raises(TransportError, match="a transfer failed"):
                wait_all([under_way])
            with pytest.raises(TransportError, match="cannot send to rank 1"):
                ends.send([torch.zeros(1)], 1, 2)
            return None
        started = time.monotonic()
        post, size = (ends.recv, 1) if rank == 1 else (ends.send, 2_000_000)
        work = post([torch.zeros(size)], 0, 0)
        with pytest.raises(TransportError, match="Connection closed by peer"):
            wait_all([work])
        return ends.lost(), time.monotonic() - started

    for lost, waited_s in run_ranks(3, rank_main)[1:]:
        assert 0 in lost
        assert waited_s < 1.0


def test_a_closed_transport_refuses_and_what_it_sent_still_arrives():
    def rank_main(rank):
        ends = transport(rank, 2)
        buffer = torch.zeros(1)
        if rank == 0:
            wait_all([ends.send([torch.ones(1)], 1, 0)])
            ends.close()
            with pytest.raises(TransportError, match="the pipeline is closed"):
                ends.send([torch.ones(1)], 1, 0)
        else:
            wait_all([ends.recv([buffer], 0, 0)])
        return buffer.item()

    assert run_ranks(2, rank_main) == [0, 1]


def test_gradients_have_connections_of_their_own_and_abort_breaks_those_too():
    def rank_main(rank):
        activations, gradients = (group(name, rank, 2) for name in ("forward", "backward"))
        ends = GlooTransport(activations, gradients)
        found = [torch.zeros(1), torch.zeros(1)]
        if rank == 0:
            wait_all([ends.send([torch.tensor([10.0 + tag])], 1, tag) for tag in (6, 7)])
            dist.barrier()
            for tag in (6, 7):
                with pytest.raises(TransportError):
                    wait_all([ends.recv([torch.zeros(1)], 1, tag)])
        else:
            works = [activations.recv([found[0]], 0, 6), gradients.recv([found[1]], 0, 7)]
            wait_all(works)
            dist.barrier()
            ends.abort()
        dist.barrier()  # a group that nobody refers to is broken too
        return [tensor.item() for tensor in found]

    assert run_ranks(2, rank_main)[1] == [16.0, 17.0]


class GlooGroups:
    """Stands where NcclGroups does, so that routing and failure run without a device."""

    def __init__(self):
        self.opened = {}

    def open(self, name, rank, size):
        self.opened[name] = GlooTransport(group(name, rank, size))
        return self.opened[name].group

    def abort(self):
        for ends in self.opened.values():
            ends.abort()

    def close(self):
        self.opened.clear()


LINKS = [(0, 1, 0), (1, 0, 1), (0, 2, 0), (1, 0, 0)]


def directed(rank, size, on_loss=lambda lost: None):
    groups = GlooGroups()
    ends = NcclTransport(transport(rank, size), groups, device=torch.device("cpu"), on_loss=on_loss)
    ends.open(LINKS[:2])
    ends.open(LINKS)
    return ends, groups


def test_every_link_has_a_group_of_its_own_and_tags_name_the_direction_alone():
    def rank_main(rank):
        ends, groups = directed(rank, 3)
        buffers = [torch.zeros_like(m) for m in MESSAGES]
        if rank == 0:
            works = [ends.send(MESSAGES, 1, 2 * 8)]
            works += [ends.recv(buffers, 1, 2 * 5 + 1)]
        elif rank == 1:
            # one queue: the message of edge 8 is received under the tag of edge 9
            works = [ends.recv(buffers, 0, 2 * 9), ends.send(MESSAGES, 0, 2 * 3 + 1)]
        else:
            works, buffers = [], MESSAGES
        wait_all(works)
        opened = list(groups.opened)
        ends.close()
        return opened, list(map(torch.equal, MESSAGES, buffers))

    opened, equal = zip(*run_ranks(3, rank_main), strict=True)
    assert opened == (["0-1-0", "1-0-1", "0-2-0", "1-0-0"], ["0-1-0", "1-0-1", "1-0-0"], ["0-2-0"])
    assert all(map(all, equal))


def test_a_ring_of_lifelines_tells_every_rank_of_a_loss_once_also_while_it_computes():
    def rank_main(rank):
        told = []
        ends, _ = directed(rank, 3, told.append)
        dist.barrier()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        deadline = time.monotonic() + 5
        while not ends.is_broken and time.monotonic() < deadline:
            pass  # never gives up the interpreter of its own will
        with pytest.raises(TransportError):
            wait_all([ends.recv([torch.zeros(1)], 1 - rank, 1 - rank)])
        time.sleep(0.1)
        return told

    told = run_ranks(3, rank_main, ends={2: -9})
    assert [len(calls) for calls in told[:2]] == [1, 1]
    assert all(2 in calls[0] for calls in told[:2])


def test_a_rank_that_closes_alarms_nobody_and_ends_its_thread():
    def rank_main(rank):
        told = []
        ends, _ = directed(rank, 3, told.append)
        dist.barrier()
        time.sleep(0.2 * rank)
        ends.close()
        ends.close()
        time.sleep(0.2 * (2 - rank))
        return told, ends.is_broken, threading.active_count()

    assert run_ranks(3, rank_main) == [([], True, 1)] * 3

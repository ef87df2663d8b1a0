"""The first error of any rank ends every rank, named; nobody hangs."""

import os
import re
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore
from torch.distributed.device_mesh import init_device_mesh

from fxpipe.errors import InputError, RankError, TransportError
from fxpipe.runtime.collectives import make_collectives
from fxpipe.runtime.failure import Board, explain, fail, report_loss
from fxpipe.runtime.launch import join_world
from fxpipe.runtime.transport.interface import wait_all
from fxpipe.runtime.transport.local import LocalNetwork
from tests.ranks import run_ranks


def attention(x):
    raise ValueError("boom\nwith a second line")


def raised(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except BaseException as error:
        return error
    pytest.fail("nothing was raised")


def run_stage(world, act):
    """What an executor does around its actions."""
    try:
        act(world.control)
    except BaseException as error:
        told = explain(
            error,
            rank=world.ranks[world.rank],
            action=f"{world.rank}F3",
            stage=world.rank,
            microbatch=3,
            module="blocks.7.attn (Attention)",
        )
        fail(error, told, transport=world.control, board=world.board, ranks=world.ranks)


def receive_from(peer):
    return lambda control: wait_all([control.recv([torch.zeros(1)], peer, 0)])


def send_to(peer):
    return lambda control: wait_all([control.send([torch.zeros(1_000_000)], peer, 0)])


def test_an_explanation_says_what_and_where_from_rank_to_source_line():
    error = raised(attention, torch.ones(1))
    told = explain(
        error, rank=2, action="2F3", stage=2, microbatch=3, module="blocks.7.attn (Attention)"
    )
    line = attention.__code__.co_firstlineno + 1
    assert str(told) == (
        "rank 2: ValueError: boom\n"
        "  at: 2F3, stage 2, microbatch 3, module blocks.7.attn (Attention), forward, "
        f"{__file__}:{line}"
    )


def test_the_source_line_is_the_users_not_that_of_torch_or_of_generated_code():
    scope = {"layer": torch.nn.Linear(3, 3)}
    exec(compile("def forward(x): return layer(x)", "<eval_with_key>.0", "exec"), scope)
    error = raised(scope["forward"], torch.ones(1, 2))
    assert re.fullmatch(re.escape(__file__) + r":\d+", explain(error, rank=0).at)
    assert explain(error, rank=0, action="0W1", source="model.py:7").at.startswith(
        "0W1, weight gradients, model.py:7"
    )


def test_an_error_of_ours_keeps_its_place_and_hint():
    told = explain(InputError("no rows", at="x", hint="give one"), rank=1, action="1RECV_F0")
    assert str(told) == "rank 1: InputError: no rows\n  at: 1RECV_F0, x\n  hint: give one"


def test_the_first_report_on_the_board_wins():
    def rank_main(rank):
        board = Board(dist.group.WORLD.get_group_store())
        before = board.first()
        dist.barrier()
        posted = board.report(f"from {rank}")
        return before, posted, board.first()

    empty, *texts = map(set, zip(*run_ranks(3, rank_main), strict=True))
    assert empty == {None}
    texts = set.union(*texts)
    assert len(texts) == 1
    assert re.fullmatch(r"from [012]", texts.pop())


def test_a_board_whose_store_has_died_leaves_everyone_with_their_own_report():
    host = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), wait_for_workers=False)
    board = Board(TCPStore("127.0.0.1", host.port, None, False, timedelta(seconds=5)))
    assert board.first() is None
    del host
    assert board.report("mine") == "mine"
    assert board.first() is None


def test_an_error_reaches_every_rank_while_the_failed_process_lives_on():
    def rank_main(rank):
        world = join_world(4)
        # the first ranks wait in a chain: rank 0 has no transfer with the rank that fails
        act = [receive_from(1), send_to(2), attention, receive_from(2)][rank]
        started = time.monotonic()
        error = raised(run_stage, world, act)
        seconds = time.monotonic() - started
        assert isinstance(error, RankError)
        chained = error.__cause__
        dist.barrier()  # no process ends before all have failed
        return str(error), type(chained).__name__, seconds

    texts, causes, seconds = zip(*run_ranks(4, rank_main), strict=True)
    assert max(seconds) < 5
    assert causes == ("NoneType", "NoneType", "ValueError", "NoneType")
    for text in texts:
        assert text.startswith("rank 2: ValueError: boom\n  at: 2F3, stage 2, microbatch 3, module")
    for text in texts[:2] + texts[3:]:
        assert "\ntraceback of rank 2:\nTraceback (most recent call last):" in text
        assert "in attention\n" in text
        assert "with a second line" in text


def test_a_rank_in_a_collective_is_released_too_and_one_that_computes_at_its_next_transfer():
    def rank_main(rank):
        world = join_world(3)

        def gather(control):
            make_collectives(world, 3).gather({rank: "state"})

        def compute(control):
            time.sleep(0.5)
            receive_from(2)(control)

        return str(raised(run_stage, world, [gather, compute, attention][rank]))

    for text in run_ranks(3, rank_main):
        assert text.startswith("rank 2: ValueError: boom\n")


def test_a_killed_rank_is_named_to_all():
    def rank_main(rank):
        world = join_world(4)
        if rank == 2:
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        act = [receive_from(1), receive_from(2), None, send_to(2)][rank]
        return str(raised(run_stage, world, act))

    texts = run_ranks(4, rank_main, ends={2: -9})
    for text in texts[:2] + texts[3:]:
        assert text == texts[0]
        assert text.startswith("rank 2: its process is gone and left no report\n  at: seen by rank")
        assert re.search(r"which waited at ([13])F3, stage \1, microbatch 3", text)


def test_of_two_errors_the_first_is_raised_and_the_other_is_its_cause():
    def rank_main(rank):
        world = join_world(2)

        def late(control):
            while world.board.first() is None:
                time.sleep(0.01)
            raise OSError("second")

        error = raised(run_stage, world, [attention, late][rank])
        return str(error), repr(error.__cause__)

    (first, own), (second, cause) = run_ranks(2, rank_main)
    assert first in second
    assert own.startswith("ValueError")
    assert cause == "OSError('second')"


def test_after_a_failure_every_step_fails_with_the_first_error():
    def rank_main(rank):
        world = join_world(2)
        raised(run_stage, world, [attention, receive_from(0)][rank])
        return str(raised(run_stage, world, send_to(1 - rank)))

    for text in run_ranks(2, rank_main):
        assert text.startswith("rank 0: ValueError: boom\n")


def test_a_transport_error_of_the_ranks_own_making_is_not_taken_for_a_loss():
    def rank_main(rank):
        world = join_world(2)

        def refuse(control):
            raise TransportError("edge 3 carries the wrong shape", at="0SEND_F0")

        return str(raised(run_stage, world, [refuse, receive_from(0)][rank]))

    for text in run_ranks(2, rank_main):
        assert text.startswith("rank 0: TransportError: edge 3 carries the wrong shape\n")


def test_an_interrupt_stays_one_and_ends_the_peers():
    def rank_main(rank):
        world = join_world(2)

        def interrupt(control):
            raise KeyboardInterrupt

        return repr(raised(run_stage, world, [interrupt, receive_from(0)][rank]))

    here, there = run_ranks(2, rank_main)
    assert here == "KeyboardInterrupt()"
    assert there.startswith("RankError('rank 0: KeyboardInterrupt\\n")


def test_a_pipeline_beside_the_one_that_fails_goes_on_and_ranks_are_named_as_in_the_world():
    def rank_main(rank):
        world = join_world(2, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp")))
        if rank < 2:
            time.sleep(0.3)
            return make_collectives(world, 2).gather({world.rank: rank})
        return str(raised(run_stage, world, [receive_from(1), attention][world.rank]))

    *others, waiting, failed = run_ranks(4, rank_main)
    assert others == [[0, 1], [0, 1]]
    assert waiting.startswith("rank 3: ValueError: boom\n  at: 1F3, stage 1")
    assert failed in waiting


def test_a_loss_that_a_thread_saw_is_what_the_next_transfer_raises():
    board, network = Board(HashStore()), LocalNetwork(2)
    report_loss(board, [1, 2], seen_by=0)
    error = TransportError("the connection was aborted")
    told = raised(
        fail, error, explain(error, rank=0), transport=network.port(0), board=board, ranks=(0, 1)
    )
    assert str(told).startswith(
        "ranks 1, 2: their processes are gone and left no report\n  at: seen by rank 0\n  hint:"
    )


def test_in_one_process_the_error_is_chained_and_the_network_is_cleared():
    network = LocalNetwork(2)
    network.port(0).send([torch.ones(1)], 1, 0)
    error = raised(attention, None)
    told = raised(fail, error, explain(error, rank=0), transport=network.port(0))
    assert isinstance(told, RankError)
    assert told.__cause__ is error
    assert not network.port(1).recv([torch.ones(1)], 0, 0).is_completed()

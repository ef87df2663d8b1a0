"""Runs a function as the ranks of a gloo group, in forked processes of this one."""

import dataclasses
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(
    world_size: int,
    fn: Callable[[int], Any],
    *,
    timeout_s: float = 30.0,
    init: bool = True,
    ends: Mapping[int, str | int] | None = None,
) -> list[Any]:
    """Calls ``fn(rank)`` on `world_size` ranks.

    Forks, because a spawned rank imports torch again: 10.1 s against 0.2 s for two ranks.

    Args:
        world_size: how many.
        fn: what it returns, or the files it writes, is all that comes back.
        timeout_s: deadline of all ranks together.
        init: makes the default group first, with a file as its store.
        ends: how ranks end that do not return: the name of an exception, or an exit code (-9 for
            a rank that is killed).

    Returns:
        Per rank: what `fn` returned; its traceback if it was expected to raise; None if it was
        expected to end with an exit code.

    Raises:
        AssertionError: a rank ended in another way, with the tracebacks of all that did.
        TimeoutError: a rank still runs after `timeout_s`; every rank is killed.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=_enter, args=(rank, world_size, Path(folder), fn, init, not ends)
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            found = _join(processes, Path(folder), ends or {}, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()
    return found


@dataclasses.dataclass(frozen=True)
class _Ended:
    """How a rank ended: an exit code, or the name of an exception; and what it left."""

    how: str | int
    value: Any

    @classmethod
    def read(cls, rank: int, process: BaseProcess, folder: Path) -> "_Ended":
        left = folder / f"rank-{rank}"
        if left.exists():
            return cls(*pickle.loads(left.read_bytes()))
        return cls(process.exitcode or 0, None)


def _join(
    processes: list[BaseProcess], folder: Path, ends: Mapping[int, str | int], timeout_s: float
) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    ended: dict[int, _Ended] = {}
    while len(ended) < len(processes):
        if time.monotonic() > deadline:
            break
        time.sleep(0.005)
        for rank, process in enumerate(processes):
            if rank not in ended and not process.is_alive():
                ended[rank] = _Ended.read(rank, process, folder)
                if ended[rank].how != ends.get(rank, 0):
                    # the others may wait for this rank: two seconds are enough to say so
                    deadline = min(deadline, time.monotonic() + 2.0)
    wrong = {r: e for r, e in ended.items() if e.how != ends.get(r, 0)}
    if wrong:
        raise AssertionError(
            "\n".join(f"rank {r} ended with {e.how}\n{e.value or ''}" for r, e in wrong.items())
        )
    if len(ended) < len(processes):
        alive = sorted(set(range(len(processes))) - set(ended))
        raise TimeoutError(f"ranks {alive} of {len(processes)} still run after {timeout_s} s")
    return [ended[rank].value for rank in range(len(processes))]


def _enter(
    rank: int, world_size: int, folder: Path, fn: Callable[[int], Any], init: bool, all_return: bool
) -> None:
    torch.set_num_threads(1)
    try:
        if init:
            store = f"file://{folder / 'store'}"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
        how, value = 0, fn(rank)
        if all_return and dist.is_initialized():
            dist.barrier()  # a rank that ends breaks the transfers of those that still run
    except BaseException as error:
        how, value = type(error).__name__, traceback.format_exc()
    part = folder / f"rank-{rank}.part"
    part.write_bytes(pickle.dumps((how, value)))
    part.rename(folder / f"rank-{rank}")
    os._exit(0)  # no exit handlers of the parent: pytest's are among them

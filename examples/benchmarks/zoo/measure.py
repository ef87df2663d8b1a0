"""Compiles and verifies one model, in a process of its own."""

from __future__ import annotations

import multiprocessing
import resource
import time
import traceback
import warnings
from multiprocessing.connection import Connection

import torch

from fxpipe import Pipeline, verify
from fxpipe import compile as compile_pipeline
from zoo.case import Case, Entry
from zoo.result import COMPILED, DIFFERS, EQUAL, FAILED, Result

STAGES, MICROBATCHES = 4, 2


def measure_apart(entry: Entry, *, limit_s: float, memory_bytes: int) -> Result:
    """The result of one model, from a forked process: what goes wrong there stays there.

    Args:
        entry: the model.
        limit_s: after it the process is killed.
        memory_bytes: address space it may take.
    """
    here, there = multiprocessing.Pipe(duplex=False)
    # forked: everything has been imported, once
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_enter, args=(entry, memory_bytes, there))
    child.start()
    there.close()
    try:
        if not here.poll(limit_s):
            return Result(entry.family, entry.name, error=f"took more than {limit_s:g} s")
        result: Result = here.recv()
    except EOFError:  # it died without a word
        child.join()
        return Result(entry.family, entry.name, error=f"died with exit code {child.exitcode}")
    finally:
        child.kill()
        child.join()
    return result


def _enter(entry: Entry, memory_bytes: int, parent: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of the libraries, about sizes that are tiny on purpose
    parent.send(measure(entry))


def measure(entry: Entry) -> Result:
    """The result of one model; what it raises is part of it."""
    result = Result(entry.family, entry.name)
    try:
        case = entry.case()
        pipe = _compile(case, result, on_meta=entry.on_meta)
        if entry.on_meta:
            result.outcome = COMPILED
            return result
        _verify(case, result)
        started = time.perf_counter()
        pipe.step(*case.args, target=case.target, **case.kwargs)
        result.step_s = time.perf_counter() - started
    except Exception as error:  # any of them is a result
        result.outcome = FAILED
        result.error = f"{type(error).__name__}: {error}"
        result.traceback = traceback.format_exc()
    return result


def _zeros(_name: str, tensor: torch.Tensor) -> None:
    """Values for a model that has none, and that is not run."""
    tensor.zero_()


def _compile(case: Case, result: Result, *, on_meta: bool) -> Pipeline:
    result.parameters = sum(p.numel() for p in case.model.parameters())
    started = time.perf_counter()
    pipe = compile_pipeline(
        case.model,
        STAGES,
        loss=case.loss,
        microbatches=MICROBATCHES,
        batch_dims=case.batch_dims,
        example_inputs=(case.args, case.kwargs),
        init=_zeros if on_meta else None,
    )
    result.compile_s = time.perf_counter() - started
    plan = pipe.plan
    result.front_end, result.why = plan.front_end, getattr(plan, "why", "")
    result.nodes = sum(stage.nodes for stage in plan.stages)
    result.edges = sum(len(stage.sends) for stage in plan.stages)
    return pipe


def _verify(case: Case, result: Result) -> None:
    found = verify(
        case.model,
        case.args,
        case.kwargs,
        case.target,
        stages=STAGES,
        loss=case.loss,
        microbatches=MICROBATCHES,
        batch_dims=case.batch_dims,
    )
    result.outcome = EQUAL if found.ok else DIFFERS
    worst = max(found.rows, key=lambda row: (not row.equal, row.difference))
    result.difference = worst.difference
    if not found.ok:
        unequal = sum(not row.equal for row in found.rows)
        result.where = f"{worst.kind} {worst.name} ({unequal} of {len(found.rows)} differ)"

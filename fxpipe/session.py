"""One compiled model with one number of microbatches: programs bound to executors."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.compiler import Compiled, make_program
from fxpipe.ir.text import format_graph
from fxpipe.options import CompileOptions
from fxpipe.runtime.driver import Driver
from fxpipe.runtime.engine import AutogradEngine
from fxpipe.runtime.executor import BACKWARD, FORWARD, Executor, Feed
from fxpipe.runtime.loss import WithLoss, output_is_loss
from fxpipe.runtime.microbatches import (
    combine,
    loss_weights,
    merge_outputs,
    piece_rows,
    split_target,
)
from fxpipe.runtime.stage import Stage
from fxpipe.runtime.state import ModelState
from fxpipe.runtime.tied import TiedGradients, TiedParameter, find_tied
from fxpipe.runtime.timing import Stopwatch
from fxpipe.runtime.transport.nccl import Link
from fxpipe.schedule import Program, Routes, Schedule

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What one step gives back.

    Args:
        loss: 0-dim, detached, on every rank; None where no loss was computed.
        output: output of the whole batch in the model's own structure, detached, on the ranks that
            hold the last stage; None elsewhere.
    """

    loss: Tensor | None
    output: Any


@dataclasses.dataclass(frozen=True)
class Held:
    """What this process holds of a compiled model.

    Args:
        stages: its stages, by index.
        tied: parameters that several stages hold.
    """

    stages: Mapping[int, Stage]
    tied: Sequence[TiedParameter]

    def tied_of(self, stage: Stage) -> list[nn.Parameter]:
        """The parameter that the stage computes with, for each of its tied links."""
        by_name = {t.name: t.held for t in self.tied}
        return [by_name[link.name][stage.index] for link in stage.tied]


def hold(
    compiled: Compiled,
    placement: Sequence[int],
    ranks: Sequence[int],
    state: ModelState,
    device: torch.device,
) -> Held:
    """The stages of these ranks on their device, each with its own gradients."""
    stages = {s.index: s for s in compiled.stages if placement[s.index] in ranks}
    modules = {index: stage.module for index, stage in stages.items()}
    state.move(modules.values(), device)
    chained = {link.name for stage in compiled.stages for link in stage.tied}
    tied = find_tied(compiled.tied, modules, placement, state.parameters(), chained)
    return Held(stages, tied)


class Session:
    """Runs steps of one program.

    Args:
        compiled: the model in one mode.
        held: the stages of this process.
        options: what the user asked for.
        driver: runs the ranks of this process.
        microbatches: M.
        with_loss: the last stage computes the loss.
        with_backward: the program has backward actions.
    """

    def __init__(
        self,
        compiled: Compiled,
        held: Held,
        options: CompileOptions,
        driver: Driver,
        *,
        microbatches: int,
        with_loss: bool,
        with_backward: bool,
    ) -> None:
        self.compiled, self.options = compiled, options
        self.microbatches, self.with_loss = microbatches, with_loss
        self._driver, self._held = driver, held
        self.schedule, self.program = make_program(
            compiled, options, microbatches, forward_only=not with_backward
        )
        self._last_rank = self.schedule.placement[-1]
        stages = dict(held.stages)
        if with_loss and (last := options.stages - 1) in stages:
            stages[last] = self._with_loss(stages[last])
        driver.agree(fingerprint(compiled, self.program), "plans")
        driver.connect(_links(compiled, self.schedule, with_backward=with_backward))
        self._executors = [
            self._executor(rank, stages, with_backward=with_backward) for rank in driver.ranks
        ]
        tied = held.tied if with_backward else ()
        self._tied = TiedGradients(tied, driver.collectives)

    def _with_loss(self, stage: Stage) -> Stage:
        loss = self.options.loss or output_is_loss
        module = WithLoss(stage.module, self.compiled.traced.output, loss)
        return dataclasses.replace(stage, module=module, has_loss=True)

    def _executor(self, rank: int, stages: Mapping[int, Stage], *, with_backward: bool) -> Executor:
        own = {i: s for i, s in stages.items() if self.schedule.placement[i] == rank}
        engines = {
            i: AutogradEngine(s, has_backward=with_backward, tied=self._held.tied_of(s))
            for i, s in own.items()
        }
        return Executor(
            self.program[rank],
            stages=own,
            engines=engines,
            placement=self.schedule.placement,
            transport=self._driver.transport(rank),
            device=self._driver.device,
            microbatches=self.microbatches,
        )

    def run(
        self, batch: Sequence[Tensor], target: Any, stopwatch: Stopwatch | None = None
    ) -> StepResult:
        """Runs one step on a whole batch, which every rank passes, and times it if asked to."""
        dims = self.compiled.batch_dims
        rows = dims.rows(batch)
        pieces = dims.split(batch, self.microbatches)
        weights = loss_weights(piece_rows(rows, self.microbatches), self.options.loss_reduction)
        targets = split_target(target, rows, self.microbatches) if self.with_loss else ()
        layouts = [self.compiled.probe.layout(piece) for piece in pieces]
        feed = Feed(pieces, targets, weights, layouts)
        for executor in self._executors:
            executor.load(feed)
        self._tied.begin()
        with torch.enable_grad(), self._timing(stopwatch):
            self._driver.run(self._executors)
        with self._driver.together():
            self._tied.finish()
            return self._result(weights)

    def _timing(self, stopwatch: Stopwatch | None) -> contextlib.AbstractContextManager[None]:
        if stopwatch is None:
            return contextlib.nullcontext()
        routes = self.compiled.routes
        if not self.schedule.has_backward:
            routes = Routes(routes.forward, ())
        return stopwatch.step(self._executors, self.schedule.placement, routes)

    def _result(self, weights: Sequence[float]) -> StepResult:
        last = next((e for e in self._executors if e.rank == self._last_rank), None)
        loss, output = None, None
        if last is not None:
            output = merge_outputs(last.model_outputs, weights, self.compiled.traced.output)
            loss = combine(last.losses, weights) if self.with_loss else None
        if self.with_loss:
            loss = self._everywhere(loss)
        return StepResult(loss, output)

    def _everywhere(self, loss: Tensor | None) -> Tensor:
        """The loss of the last stage, on every rank."""
        # float64 holds every loss exactly; the other ranks learn its dtype from the message
        sent = torch.zeros(2, dtype=torch.float64)
        if loss is not None:
            sent = torch.tensor([_DTYPES.index(loss.dtype), float(loss)], dtype=torch.float64)
        code, value = self._driver.collectives.broadcast(sent, self._last_rank).tolist()
        if loss is not None:
            return loss
        return torch.tensor(value, dtype=_DTYPES[int(code)], device=self._driver.device)


def _links(compiled: Compiled, schedule: Schedule, *, with_backward: bool) -> list[Link]:
    """Which rank sends to which, and in which direction, ascending."""
    routes = [(pair, FORWARD) for pair in compiled.routes.forward]
    if with_backward:
        routes += [(pair, BACKWARD) for pair in compiled.routes.backward]
    place = schedule.placement
    return sorted({(place[a], place[b], way) for (a, b), way in routes if place[a] != place[b]})


def fingerprint(compiled: Compiled, program: Program) -> str:
    """A digest of what all ranks must agree on: graph, order, and shapes of what crosses."""
    text = format_graph(compiled.graph) + repr(program)
    return hashlib.sha256(text.encode()).hexdigest()

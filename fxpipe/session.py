"""One compiled model with one number of microbatches: programs bound to executors."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.compiler import PREFETCH, Compiled, make_program
from fxpipe.ir.text import format_graph
from fxpipe.options import CompileOptions
from fxpipe.runtime.driver import Driver
from fxpipe.runtime.engine import AutogradEngine
from fxpipe.runtime.executor import Executor
from fxpipe.runtime.loss import WithLoss, output_is_loss
from fxpipe.runtime.stage import Stage
from fxpipe.runtime.state import ModelState
from fxpipe.runtime.stepper import LossPlace, Resume, Stepper, Timing, links_of, untimed
from fxpipe.runtime.tied import TiedGradients, TiedParameter, find_tied
from fxpipe.runtime.timing import Stopwatch
from fxpipe.runtime.weights import Weights
from fxpipe.schedule import Program, Routes


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
    weights: Weights | None,
) -> Held:
    """The stages of these ranks on their device, each with its own gradients."""
    stages = {s.index: s for s in compiled.stages if placement[s.index] in ranks}
    modules = {index: stage.module for index, stage in stages.items()}
    state.move(modules.values(), device, weights)
    if placement[0] in ranks:
        state.adopt(device, weights, compiled.owners)
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
        loss: who computes the loss.
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
        loss: LossPlace,
        with_backward: bool,
    ) -> None:
        self.compiled, self.options = compiled, options
        self.microbatches, self.loss = microbatches, loss
        self._driver, self._held = driver, held
        is_outside = loss is LossPlace.OUTSIDE
        self.schedule, self.program = make_program(
            compiled,
            # all forwards run before the caller has a loss: the order is GPipe's, whatever is asked
            dataclasses.replace(options, schedule="GPipe") if is_outside else options,
            microbatches,
            forward_only=not with_backward,
            prefetch=0 if is_outside else PREFETCH,
        )
        stages = dict(held.stages)
        if (last := options.stages - 1) in stages:
            stages[last] = self._last_stage(stages[last])
        driver.agree(fingerprint(compiled, self.program), "plans")
        self._routes = compiled.routes
        if not with_backward:
            self._routes = Routes(compiled.routes.forward, ())
        driver.connect(links_of(self._routes, self.schedule.placement))
        self._executors = [
            self._executor(rank, stages, with_backward=with_backward) for rank in driver.ranks
        ]
        self._stepper = Stepper(
            driver,
            self._executors,
            TiedGradients(held.tied if with_backward else (), driver.collectives),
            inputs=compiled.batch_dims,
            microbatches=microbatches,
            last_rank=self.schedule.placement[-1],
            loss=loss,
            loss_reduction=options.loss_reduction,
            layout_of=compiled.probe.layout,
            output_dims=functools.partial(
                compiled.probe.output_dims, rows=compiled.batch_dims.dims
            ),
        )

    def _last_stage(self, stage: Stage) -> Stage:
        if self.loss is LossPlace.OUTSIDE:
            return dataclasses.replace(stage, takes_output_gradients=True)
        if self.loss is LossPlace.NOWHERE:
            return stage
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
        self,
        batch: Sequence[Tensor],
        target: Any,
        stopwatch: Stopwatch | None = None,
        *,
        scale: float = 1.0,
    ) -> StepResult:
        """Runs one step on a whole batch, and times it if asked to; see ``Stepper.run``."""
        loss, leaves = self._stepper.run(
            batch,
            target,
            scale=scale,
            everywhere=self.options.outputs == "all",
            timing=self._timing(stopwatch),
        )
        structure = self.compiled.traced.output
        return StepResult(loss, None if leaves is None else structure.unflatten(leaves))

    def forward(
        self, batch: Sequence[Tensor], stopwatch: Stopwatch | None = None
    ) -> tuple[list[Any], Resume]:
        """Runs the forwards of a batch, for a loss computed outside; see ``Stepper.forward``."""
        return self._stepper.forward(batch, self._timing(stopwatch))

    def _timing(self, stopwatch: Stopwatch | None) -> Timing:
        if stopwatch is None:
            return untimed

        def timed(goes_on: bool) -> contextlib.AbstractContextManager[None]:
            place = self.schedule.placement
            return stopwatch.step(self._executors, place, self._routes, goes_on=goes_on)

        return timed


def fingerprint(compiled: Compiled, program: Program) -> str:
    """A digest of what all ranks must agree on: graph, order, and shapes of what crosses."""
    text = format_graph(compiled.graph) + repr(program)
    return hashlib.sha256(text.encode()).hexdigest()

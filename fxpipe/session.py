"""One compiled model with one number of microbatches: programs bound to executors."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe import tree
from fxpipe.compiler import Compiled, make_program
from fxpipe.errors import FxpipeError
from fxpipe.ir.text import format_graph
from fxpipe.options import CompileOptions
from fxpipe.runtime.driver import Driver
from fxpipe.runtime.engine import AutogradEngine
from fxpipe.runtime.executor import BACKWARD, FORWARD, Executor, Feed
from fxpipe.runtime.loss import WithLoss, output_is_loss
from fxpipe.runtime.microbatches import (
    combine,
    loss_weights,
    merge_leaves,
    piece_rows,
    split_gradients,
    split_target,
)
from fxpipe.runtime.stage import Stage
from fxpipe.runtime.state import ModelState
from fxpipe.runtime.tied import TiedGradients, TiedParameter, find_tied
from fxpipe.runtime.timing import Stopwatch
from fxpipe.runtime.transport.nccl import Link
from fxpipe.runtime.weights import Weights
from fxpipe.schedule import Program, Routes, Schedule

_AUTOCAST = ("cpu", "cuda")
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


class LossPlace(enum.Enum):
    """Where the loss of a step is computed."""

    INSIDE = "on the last stage"
    OUTSIDE = "by the caller, who runs backward"
    NOWHERE = "not at all"


Resume = Callable[[Sequence[Tensor | None]], None]
"""Runs the backwards of a batch, given the gradient of each leaf of its output."""


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
            prefetch=0 if is_outside else 1,
        )
        self._last_rank = self.schedule.placement[-1]
        stages = dict(held.stages)
        if (last := options.stages - 1) in stages:
            stages[last] = self._last_stage(stages[last])
        driver.agree(fingerprint(compiled, self.program), "plans")
        driver.connect(_links(compiled, self.schedule, with_backward=with_backward))
        self._executors = [
            self._executor(rank, stages, with_backward=with_backward) for rank in driver.ranks
        ]
        tied = held.tied if with_backward else ()
        self._tied = TiedGradients(tied, driver.collectives)
        self._forwards = 0

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
        """Runs one step on a whole batch, which every rank passes.

        Args:
            batch: inputs of the model.
            target: what the loss compares with.
            stopwatch: times the step.
            scale: gradients are those of the loss times this.
        """
        feed = self._feed(batch, target)
        weights = feed.weights
        feed.weights = [weight * scale for weight in weights]
        for executor in self._executors:
            executor.load(feed)
        self._tied.begin()
        self._drive(stopwatch)
        with self._driver.together():
            self._tied.finish()
            return self._result(weights)

    def forward(
        self, batch: Sequence[Tensor], stopwatch: Stopwatch | None = None
    ) -> tuple[list[Any], Resume]:
        """Runs the forwards of a batch; the loss is computed outside.

        Returns:
            The leaves of the output, on every rank, and what runs the backwards, given the gradient
            of each leaf.
        """
        feed = self._feed(batch, None)
        for executor in self._executors:
            executor.drop()  # a forward that nobody ran backward
            executor.load(feed, forward_only=True)
        self._drive(stopwatch)
        self._forwards += 1
        with self._driver.together():
            leaves = self._on_every_rank(self._leaves(feed.weights))
        return leaves, functools.partial(self._backward, self._forwards, feed.weights, stopwatch)

    def _backward(
        self,
        number: int,
        weights: Sequence[float],
        stopwatch: Stopwatch | None,
        gradients: Sequence[Tensor | None],
    ) -> None:
        if number != self._forwards:
            raise FxpipeError(
                "backward runs once for the output of the last call, and this is another one",
                hint="call backward before the pipeline is called again",
            )
        self._forwards += 1  # not a second time
        self._tied.begin()
        for executor in self._executors:
            pieces: Sequence[Sequence[Tensor | None]] = ()
            if executor.rank == self._last_rank:
                pieces = split_gradients(gradients, executor.model_outputs, weights)
            executor.resume(pieces)
        self._drive(stopwatch, goes_on=True)
        with self._driver.together():
            self._tied.finish()

    def _feed(self, batch: Sequence[Tensor], target: Any) -> Feed:
        dims = self.compiled.batch_dims
        rows = dims.rows(batch)
        pieces = dims.split(batch, self.microbatches)
        weights = loss_weights(piece_rows(rows, self.microbatches), self.options.loss_reduction)
        inside = self.loss is LossPlace.INSIDE
        targets = split_target(target, rows, self.microbatches) if inside else ()
        return Feed(pieces, targets, weights, [self.compiled.probe.layout(p) for p in pieces])

    def _drive(self, stopwatch: Stopwatch | None, *, goes_on: bool = False) -> None:
        with torch.enable_grad(), restored_autocast(), self._timing(stopwatch, goes_on):
            self._driver.run(self._executors)

    def _timing(
        self, stopwatch: Stopwatch | None, goes_on: bool
    ) -> contextlib.AbstractContextManager[None]:
        if stopwatch is None:
            return contextlib.nullcontext()
        routes = self.compiled.routes
        if not self.schedule.has_backward:
            routes = Routes(routes.forward, ())
        place = self.schedule.placement
        return stopwatch.step(self._executors, place, routes, goes_on=goes_on)

    def _result(self, weights: Sequence[float]) -> StepResult:
        leaves = self._leaves(weights)
        if self.options.outputs == "all":
            leaves = self._on_every_rank(leaves)
        output = None if leaves is None else self.compiled.traced.output.unflatten(leaves)
        return StepResult(self._loss(weights), output)

    def _leaves(self, weights: Sequence[float]) -> list[Any] | None:
        """The leaves of the output of the batch; None where the last stage is not."""
        last = self._last_executor
        return None if last is None else merge_leaves(last.model_outputs, weights)

    def _on_every_rank(self, leaves: list[Any] | None) -> list[Any]:
        if self._driver.is_whole:
            assert leaves is not None  # the last stage is here
            return leaves
        (rank,) = self._driver.ranks
        moved = tree.map_leaves(lambda v: v.cpu() if isinstance(v, Tensor) else v, leaves)
        found = self._driver.collectives.gather({rank: moved})[self._last_rank]
        device = self._driver.device
        there = [v.to(device) if isinstance(v, Tensor) else v for v in found]
        return there if leaves is None else leaves

    @property
    def _last_executor(self) -> Executor | None:
        return next((e for e in self._executors if e.rank == self._last_rank), None)

    def _loss(self, weights: Sequence[float]) -> Tensor | None:
        if self.loss is not LossPlace.INSIDE:
            return None
        last = self._last_executor
        return self._everywhere(None if last is None else combine(last.losses, weights))

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


@contextlib.contextmanager
def restored_autocast() -> Iterator[None]:
    """Leaves autocast as it was, also where a region was entered and its stage then failed."""
    before = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in _AUTOCAST]
    try:
        yield
    finally:
        for kind, is_enabled, dtype in before:
            torch.set_autocast_enabled(kind, is_enabled)
            torch.set_autocast_dtype(kind, dtype)


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

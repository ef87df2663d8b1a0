"""Runs a program on whole batches: cuts them, feeds the executors, puts the results together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpipe.runtime.driver import Driver
from fxpipe.runtime.executor import BACKWARD, FORWARD, Executor, Feed
from fxpipe.runtime.microbatches import (
    BatchDims,
    combine,
    loss_weights,
    merge_leaves,
    piece_rows,
    split_target,
)
from fxpipe.runtime.stage import Layout
from fxpipe.runtime.tied import TiedGradients
from fxpipe.runtime.transport.nccl import Link
from fxpipe.schedule import Routes

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What one step gives back.

    Args:
        loss: 0-dim, detached, on every rank; None where no loss is computed.
        output: the leaves of the output of the whole batch, detached, by name, on the rank that
            holds the last stage; None elsewhere.
    """

    loss: Tensor | None
    output: dict[str, Any] | None


class Stepper:
    """Steps of one program with one number of microbatches.

    Args:
        driver: runs the ranks of this process.
        executors: those of these ranks.
        tied: the parameters that several stages hold.
        inputs: along which dimension each input is cut.
        microbatches: M.
        last_rank: the rank of the last stage.
        has_loss: the last stage computes the loss.
        loss_reduction: ``"mean"`` or ``"sum"``.
        layout_of: the layout of a microbatch, from its inputs.
        outputs: a name for each leaf of the output.
    """

    def __init__(
        self,
        driver: Driver,
        executors: Sequence[Executor],
        tied: TiedGradients,
        *,
        inputs: BatchDims,
        microbatches: int,
        last_rank: int,
        has_loss: bool,
        loss_reduction: str,
        layout_of: Callable[[Sequence[Tensor]], Layout],
        outputs: Sequence[str],
    ) -> None:
        self._driver, self._executors, self._tied = driver, executors, tied
        self._inputs, self._microbatches = inputs, microbatches
        self._last_rank, self._has_loss = last_rank, has_loss
        self._loss_reduction, self._layout_of, self._outputs = loss_reduction, layout_of, outputs

    def run(self, batch: Sequence[Tensor], target: Any) -> StepResult:
        """Runs one step on a whole batch, which every rank passes."""
        rows, count = self._inputs.rows(batch), self._microbatches
        pieces = self._inputs.split(batch, count)
        weights = loss_weights(piece_rows(rows, count), self._loss_reduction)
        targets = split_target(target, rows, count) if self._has_loss else ()
        feed = Feed(pieces, targets, weights, [self._layout_of(piece) for piece in pieces])
        for executor in self._executors:
            executor.load(feed)
        self._tied.begin()
        with torch.enable_grad():
            self._driver.run(self._executors)
        with self._driver.together():
            self._tied.finish()
            return self._result(weights)

    def _result(self, weights: Sequence[float]) -> StepResult:
        last = next((e for e in self._executors if e.rank == self._last_rank), None)
        loss, output = None, None
        if last is not None:
            leaves = merge_leaves(last.model_outputs, weights)
            output = dict(zip(self._outputs, leaves, strict=True))
            loss = combine(last.losses, weights) if self._has_loss else None
        if self._has_loss:
            loss = loss_on_every_rank(loss, self._last_rank, self._driver)
        return StepResult(loss, output)


def loss_on_every_rank(loss: Tensor | None, source: int, driver: Driver) -> Tensor:
    """The loss that rank `source` has; None on the others."""
    # float64 holds every loss exactly; the other ranks learn its dtype from the message
    sent = torch.zeros(2, dtype=torch.float64)
    if loss is not None:
        sent = torch.tensor([_DTYPES.index(loss.dtype), float(loss)], dtype=torch.float64)
    code, value = driver.collectives.broadcast(sent, source).tolist()
    if loss is not None:
        return loss
    return torch.tensor(value, dtype=_DTYPES[int(code)], device=driver.device)


def links_of(routes: Routes, placement: Sequence[int]) -> list[Link]:
    """Which rank sends to which, and in which direction, ascending."""
    ways = [(pair, FORWARD) for pair in routes.forward]
    ways += [(pair, BACKWARD) for pair in routes.backward]
    ends = {(placement[a], placement[b], way) for (a, b), way in ways}
    return sorted(end for end in ends if end[0] != end[1])

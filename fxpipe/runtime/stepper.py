"""Runs a program on whole batches: cuts them, feeds the executors, puts the results together."""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpipe import tree
from fxpipe.errors import FxpipeError
from fxpipe.runtime.driver import Driver
from fxpipe.runtime.executor import BACKWARD, FORWARD, Executor, Feed
from fxpipe.runtime.microbatches import (
    BatchDims,
    combine,
    loss_weights,
    merge_leaves,
    piece_rows,
    split_gradients,
    split_target,
)
from fxpipe.runtime.stage import Layout
from fxpipe.runtime.tied import TiedGradients
from fxpipe.runtime.transport.nccl import Link
from fxpipe.schedule import Routes

_AUTOCAST = ("cpu", "cuda")
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class LossPlace(enum.Enum):
    """Where the loss of a step is computed."""

    INSIDE = "on the last stage"
    OUTSIDE = "by the caller, who runs backward"
    NOWHERE = "not at all"


Resume = Callable[[Sequence[Tensor | None]], None]
"""Runs the backwards of a batch, given the gradient of each leaf of its output."""

Timing = Callable[[bool], contextlib.AbstractContextManager[None]]
"""Surrounds a run of the program; is told whether it goes on with one that stopped."""


def untimed(goes_on: bool) -> contextlib.AbstractContextManager[None]:
    """Surrounds a run that nobody times."""
    return contextlib.nullcontext()


class Stepper:
    """Steps of one program with one number of microbatches.

    Args:
        driver: runs the ranks of this process.
        executors: those of these ranks.
        tied: the parameters that several stages hold.
        inputs: along which dimension each input is cut.
        microbatches: M.
        last_rank: the rank of the last stage.
        loss: who computes the loss.
        loss_reduction: ``"mean"`` or ``"sum"``.
        layout_of: the layout of a microbatch, from its inputs.
        output_dims: the dimension of the rows of each leaf of the model's output, None where it has
            none, from the inputs of a microbatch; called where the last stage is.
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
        loss: LossPlace,
        loss_reduction: str,
        layout_of: Callable[[Sequence[Tensor]], Layout],
        output_dims: Callable[[Sequence[Tensor]], Sequence[int | None]],
    ) -> None:
        self._driver, self._executors, self._tied = driver, executors, tied
        self._inputs, self._microbatches = inputs, microbatches
        self._last_rank, self._loss_place = last_rank, loss
        self._loss_reduction, self._layout_of = loss_reduction, layout_of
        self._output_dims = output_dims
        self._last = next((e for e in executors if e.rank == last_rank), None)
        self._forwards = 0

    def run(
        self,
        batch: Sequence[Tensor],
        target: Any,
        *,
        scale: float = 1.0,
        everywhere: bool = False,
        timing: Timing = untimed,
    ) -> tuple[Tensor | None, list[Any] | None]:
        """Runs one step on a whole batch, which every rank passes.

        Args:
            batch: inputs of the model.
            target: what the loss compares with.
            scale: gradients are those of the loss times this.
            everywhere: every rank gets the output, not only that of the last stage.
            timing: surrounds the run.

        Returns:
            The loss, on every rank, or None where none is computed; and the leaves of the output,
            or None where they are not.
        """
        feed = self._feed(batch, target)
        weights = feed.weights
        feed.weights = [weight * scale for weight in weights]
        for executor in self._executors:
            executor.load(feed)
        self._tied.begin()
        self._drive(timing, goes_on=False)
        with self._driver.together():
            self._tied.finish()
            leaves = self._leaves(feed.batch[0], weights)
            return self._loss(weights), self._on_every_rank(leaves) if everywhere else leaves

    def forward(
        self, batch: Sequence[Tensor], timing: Timing = untimed
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
        self._drive(timing, goes_on=False)
        self._forwards += 1
        with self._driver.together():
            leaves = self._on_every_rank(self._leaves(feed.batch[0], feed.weights))
        return leaves, functools.partial(self._backward, self._forwards, feed, timing)

    def _backward(
        self,
        number: int,
        feed: Feed,
        timing: Timing,
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
            if executor is self._last:
                dims = self._output_dims(feed.batch[0])
                pieces = split_gradients(gradients, executor.model_outputs, feed.weights, dims)
            executor.resume(pieces)
        self._drive(timing, goes_on=True)
        with self._driver.together():
            self._tied.finish()

    def _feed(self, batch: Sequence[Tensor], target: Any) -> Feed:
        rows, count = self._inputs.rows(batch), self._microbatches
        pieces, rows_of = self._inputs.split(batch, count), piece_rows(rows, count)
        weights = loss_weights(rows_of, self._loss_reduction)
        inside = self._loss_place is LossPlace.INSIDE
        targets = split_target(target, rows, count) if inside else ()
        # pieces of one batch with as many rows have the same shapes: two layouts at most
        layouts = {n: self._layout_of(pieces[rows_of.index(n)]) for n in set(rows_of)}
        return Feed(pieces, targets, weights, [layouts[n] for n in rows_of])

    def _drive(self, timing: Timing, *, goes_on: bool) -> None:
        with torch.enable_grad(), restored_autocast(), timing(goes_on):
            self._driver.run(self._executors)

    def _leaves(self, piece: Sequence[Tensor], weights: Sequence[float]) -> list[Any] | None:
        """The leaves of the output of the batch; None where the last stage is not.

        Args:
            piece: inputs of a microbatch.
            weights: what each microbatch counts.
        """
        if self._last is None:
            return None
        return merge_leaves(self._last.model_outputs, weights, self._output_dims(piece))

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

    def _loss(self, weights: Sequence[float]) -> Tensor | None:
        """The loss of the last stage, on every rank."""
        if self._loss_place is not LossPlace.INSIDE:
            return None
        loss = None if self._last is None else combine(self._last.losses, weights)
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


def links_of(routes: Routes, placement: Sequence[int]) -> list[Link]:
    """Which rank sends to which, and in which direction, ascending."""
    ways = [(pair, FORWARD) for pair in routes.forward]
    ways += [(pair, BACKWARD) for pair in routes.backward]
    ends = {(placement[a], placement[b], way) for (a, b), way in ways}
    return sorted(end for end in ends if end[0] != end[1])

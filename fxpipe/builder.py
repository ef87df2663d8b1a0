"""Compiles a model for the batches that it meets, and opens the sessions that run them."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fxpipe.compiler import Compiled, Microbatch, compile_model, first_microbatch, modes
from fxpipe.errors import FxpipeError
from fxpipe.log import warn_once
from fxpipe.options import CompileOptions
from fxpipe.runtime.driver import Driver
from fxpipe.runtime.state import ModelState
from fxpipe.runtime.stepper import LossPlace
from fxpipe.runtime.weights import Weights
from fxpipe.schedule import make_schedule
from fxpipe.self_check import is_small, self_check
from fxpipe.session import Session, hold
from fxpipe.trace.inputs import BoundInputs, InputBinder
from fxpipe.variants import Variant, Variants

log = logging.getLogger(__name__)


class Builder:
    """Makes the graphs of one model, one for each mode and structure of inputs that is met.

    The first graph decides which stage keeps which parameters; later ones are cut so that they
    stay there.

    Args:
        model: the model; shared, never modified.
        options: checked options.
        driver: runs the ranks of this process.
        state: of the model.
    """

    def __init__(
        self, model: nn.Module, options: CompileOptions, driver: Driver, state: ModelState
    ) -> None:
        self.binder = InputBinder(model)
        self.training = {name: module.training for name, module in model.named_modules()}
        self.placement = _placement(options)
        self.first: Compiled | None = None
        self.first_training = True
        self.first_microbatches = options.wanted_microbatches
        self._model, self._options = model, options
        self._driver, self._state = driver, state
        self._weights = Weights(options.weights, options.init) if state.is_meta else None
        self._variants = Variants()
        self._sessions: dict[Hashable, Session] = {}

    def require_first(self) -> Compiled:
        """The first graph.

        Raises:
            FxpipeError: no batch has been seen.
        """
        if self.first is None:
            raise FxpipeError(
                "the pipeline is not compiled yet: no batch has been seen",
                hint="pass example_inputs=(args, kwargs) to compile, or run a step first",
            )
        return self.first

    def owner_stages(self, name: str) -> tuple[int, ...]:
        """The stages that hold a parameter or buffer, by canonical name."""
        # What no stage reads, the first one keeps: it is saved and loaded, and never gets a
        # gradient.
        return self.require_first().owners.get(name, (0,))

    def microbatches(self, rows: int) -> int:
        """M for a batch of so many rows."""
        wanted = self._options.wanted_microbatches
        if rows < wanted and self._options.microbatches is not None:
            warn_once(
                log, "a batch of %d rows is cut into %d microbatches, not %d", rows, rows, wanted
            )
        return min(wanted, rows)

    def session(
        self,
        bound: BoundInputs,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        loss: LossPlace,
        *,
        with_backward: bool,
    ) -> Session:
        """What runs this batch; compiled, and agreed on by all ranks, if there is none yet."""
        compiled, held = self.variant(bound, args, kwargs)
        count = self.microbatches(compiled.batch_dims.rows(bound.tensors))
        key = (id(compiled), count, loss, with_backward)
        if key not in self._sessions:
            kept = {k: s for k, s in self._sessions.items() if s.compiled in self._variants}
            self._sessions = kept  # a graph that was dropped takes its sessions with it
            self._sessions[key] = Session(
                compiled,
                held,
                self._options,
                self._driver,
                microbatches=count,
                loss=loss,
                with_backward=with_backward,
            )
        return self._sessions[key]

    def variant(
        self, bound: BoundInputs, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Variant:
        """The graph for this mode, and these inputs; traced if there is none yet."""
        mode = tuple(self.training.values())
        frozen = tuple(p.requires_grad for p in self._model.parameters())

        def pieces(compiled: Compiled) -> list[list[Tensor]]:
            dims = compiled.batch_dims
            return dims.split(bound.tensors, self.microbatches(dims.rows(bound.tensors)))

        def make() -> Variant:
            example = first_microbatch(self._model, tuple(args), kwargs, self._options)
            return self._make(example, bound)

        return self._variants.choose((mode, frozen, bound.key), bound.tensors, pieces, make)

    def _make(self, example: Microbatch, bound: BoundInputs) -> Variant:
        compiled = self._compile_on(example)
        if self.first is None:
            self.first, self.first_training = compiled, self.training[""]
            self.first_microbatches = self.microbatches(compiled.batch_dims.rows(bound.tensors))
        held = hold(
            compiled,
            self.placement,
            self._driver.ranks,
            self._state,
            self._driver.device,
            self._weights,
        )
        return Variant(compiled, held)

    def _compile_on(self, example: Microbatch) -> Compiled:
        with modes(self._model, self.training):
            compiled = compile_model(
                self._model,
                example,
                self._options,
                canonical=self._state.canonical,
                training=self.training[""],
                like=self.first,
            )
            wanted = self._options.verify
            if is_small(self._model) if wanted is None else wanted:
                self_check(
                    self._model,
                    compiled,
                    example.args,
                    example.kwargs,
                    self._state.canonical,
                    training=self.training[""],
                )
        return compiled


def _placement(options: CompileOptions) -> tuple[int, ...]:
    """Rank of every stage, whatever the number of microbatches."""
    schedule = make_schedule(
        options.schedule, stages=options.stages, chunks=options.chunks, microbatches=1
    )
    return schedule.placement

"""The pipeline object: what ``compile`` returns and users train with."""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, fx, nn

from fxpipe import tree
from fxpipe.compiler import Compiled, Microbatch, compile_model, first_microbatch, modes
from fxpipe.errors import FxpipeError, OptionError
from fxpipe.log import warn_once
from fxpipe.loop import with_gradients
from fxpipe.manager import Step
from fxpipe.options import CompileOptions
from fxpipe.plan import Plan, make_plan
from fxpipe.runtime.clip import clip_grad_norm
from fxpipe.runtime.driver import Driver, make_driver
from fxpipe.runtime.scaler import GradScaler
from fxpipe.runtime.state import ModelState
from fxpipe.runtime.stepper import LossPlace
from fxpipe.runtime.timing import Stopwatch
from fxpipe.runtime.weights import Weights
from fxpipe.schedule import Action, Timeline, make_schedule
from fxpipe.self_check import is_small, self_check
from fxpipe.session import Session, StepResult, hold
from fxpipe.trace.inputs import BoundInputs, InputBinder
from fxpipe.variants import Variant, Variants

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from fxpipe.emit.script import Example

log = logging.getLogger(__name__)


class Pipeline:
    """A model cut into stages, with the schedule that drives them.

    Made by ``fxpipe.compile``. Every rank makes the same calls with the same batches.

    Args:
        model: the model; shared, never modified.
        options: checked options.
        mesh: mesh with a ``"pp"`` dimension; None: one over all ranks.
        example_inputs: (args, kwargs) of a batch; None: compiled at the first step from its batch.
    """

    def __init__(
        self,
        model: nn.Module,
        options: CompileOptions,
        *,
        mesh: DeviceMesh | None = None,
        example_inputs: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None,
    ) -> None:
        self.options = options
        self._model = model
        self._binder = InputBinder(model)
        self._state = ModelState(model)
        if options.verify and self._state.is_meta:
            raise OptionError(
                "a model on the meta device cannot be verified: it has no values",
                at="verify=True",
                hint="verify a small model of the same kind",
            )
        device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
        self._driver: Driver = make_driver(options.transport, options.ranks, mesh, device)
        self._placement = _placement(options)
        self._training = {name: module.training for name, module in model.named_modules()}
        self._variants = Variants()
        self._sessions: dict[Hashable, Session] = {}
        self._first: Compiled | None = None
        self._first_training = True
        self._planned_microbatches = options.wanted_microbatches
        self._weights = Weights(options.weights, options.init) if self._state.is_meta else None
        self._stopwatch: Stopwatch | None = None
        if example_inputs is not None:
            args, kwargs = self._on_device(example_inputs)
            self._compile(self._binder.bind(args, kwargs), tuple(args), dict(kwargs))

    # ---------------------------------------------------------------------------------------
    # Running

    def step(
        self, *args: Any, target: Any = None, scaler: GradScaler | None = None, **kwargs: Any
    ) -> StepResult:
        """Runs one batch forward and backward and adds to the gradients.

        In eval mode, or inside ``torch.no_grad()``, forward and loss alone.

        Args:
            args: positional inputs of the model, the whole batch.
            target: what the loss compares with, the whole batch: a tensor or a container of
                tensors, cut along dimension 0.
            scaler: scales the loss before backward, not the one that is returned; see
                `grad_scaler`.
            kwargs: keyword inputs of the model.

        Returns:
            The loss of the batch on every rank, and its output where the last stage is.

        Raises:
            InputError: the batch does not fit the model.
            RankError: a rank failed; every rank raises it with the same cause.
        """
        backward = self.training and torch.is_grad_enabled()
        if "target" in self._binder.signature.parameters:  # the model computes the loss itself
            kwargs["target"] = target
        args, kwargs, target = self._on_device((args, kwargs, target))
        bound = self._binder.bind(args, kwargs)
        session = self._session(bound, args, kwargs, LossPlace.INSIDE, with_backward=backward)
        scale = 1.0 if scaler is None else scaler.get_scale()
        return session.run(bound.tensors, target, self._stopwatch, scale=scale)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one batch forward.

        In train mode the output has gradients: the plain loop works, with the loss computed by the
        same code on every rank and ``loss.backward()`` running the pipeline backward, in the order
        of GPipe. In eval mode, or inside ``torch.no_grad()``, forward alone.

        Returns:
            The output of the batch in the model's own structure: in train mode on every rank;
            else as the option ``outputs`` says, None on the other ranks.

        Raises:
            InputError: the batch does not fit the model.
            RankError: a rank failed; every rank raises it with the same cause.
        """
        args, kwargs = self._on_device((args, kwargs))
        bound = self._binder.bind(args, kwargs)
        if not (self.training and torch.is_grad_enabled()):
            place = LossPlace.NOWHERE
            session = self._session(bound, args, kwargs, place, with_backward=False)
            return session.run(bound.tensors, None, self._stopwatch).output
        session = self._session(bound, args, kwargs, LossPlace.OUTSIDE, with_backward=True)
        leaves, resume = session.forward(bound.tensors, self._stopwatch)
        traced = session.compiled.traced
        return traced.output.unflatten(with_gradients(leaves, traced.needs_gradient, resume))

    @contextlib.contextmanager
    def timed(self) -> Iterator[list[Timeline]]:
        """Measures the compute of each step that runs inside; every rank does.

        ::

            with pipe.timed() as timelines:
                pipe.step(x, target=y)
            timelines[0].bubble, pipe.simulate().bubble  # measured, predicted

        A span is computing alone, without the wait before it. Where all ranks run in this process,
        they take turns: their spans are then placed as `simulate` places the predicted ones, as if
        each rank had a processor of its own and transfers took no time.

        Yields:
            An empty list; at the end it gets one timeline a step, in seconds from the step's first
            action, the same on every rank.

        Raises:
            FxpipeError: the steps are timed already.
        """
        if self._stopwatch is not None:
            raise FxpipeError("the steps are timed already", hint="leave the outer timed() first")
        timelines: list[Timeline] = []
        self._stopwatch = stopwatch = Stopwatch(self._driver.device)
        try:
            yield timelines
        finally:
            self._stopwatch = None
        with self._driver.together():
            driver = self._driver
            timelines += stopwatch.timelines(driver.collectives, is_whole=driver.is_whole)

    def _on_device(self, batch: Any) -> Any:
        """A batch on the device of this process; where that is the CPU, as it is."""
        device = self._driver.device
        if device.type == "cpu":
            return batch
        return tree.map_leaves(lambda v: v.to(device) if isinstance(v, Tensor) else v, batch)

    def train(self, mode: bool = True) -> Self:
        """Puts the pipeline, not the model that was handed in, in train mode."""
        self._training = dict.fromkeys(self._training, mode)
        return self

    def eval(self) -> Self:
        """Puts the pipeline, not the model that was handed in, in eval mode."""
        return self.train(False)

    @property
    def training(self) -> bool:
        """Whether the model as a whole is in train mode."""
        return bool(self._training[""])

    # ---------------------------------------------------------------------------------------
    # Parameters and state

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters, under their original names; a tied one under its first name."""
        yield from self._held_parameters().items()

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, each once."""
        yield from self._held_parameters().values()

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's buffers, under their original names."""
        for name, buffer in self._state.buffers().items():
            if self._is_here(name):
                yield name, buffer

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of this rank's parameters, as ``nn.Module.zero_grad`` does."""
        for parameter in self.parameters():
            if parameter.grad is not None:
                if set_to_none:
                    parameter.grad = None
                else:
                    parameter.grad = torch.zeros_like(parameter.grad)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clips the gradients by their norm over all stages, every parameter counted once.

        Every rank calls it.

        Returns:
            The norm before clipping, on every rank.
        """
        here = self._held_parameters()
        owned = [p for name, p in here.items() if self._owner_rank(name) in self._driver.ranks]
        return clip_grad_norm(
            list(here.values()),
            owned,
            self._driver,
            max_norm=max_norm,
            norm_type=norm_type,
            error_if_nonfinite=error_if_nonfinite,
        )

    def grad_scaler(self, **kwargs: Any) -> GradScaler:
        """A ``torch.amp.GradScaler`` that all ranks agree on, for fp16; arguments as of torch's."""
        return GradScaler(self._driver, **kwargs)

    def state_dict(self) -> OrderedDict[str, Any]:
        """This rank's entries of the model's state dict, under the original names."""
        return self._state.state_dict(self._is_here)

    def full_state_dict(self) -> OrderedDict[str, Any]:
        """The model's whole state dict, gathered on every rank. Every rank calls it."""
        if self._driver.is_whole:
            return self.state_dict()
        rank = self._driver.ranks[0]
        with self._driver.together():
            return self._state.gather(self.state_dict(), self._driver.collectives, rank)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Loads this rank's entries from its own, or from the whole, state dict.

        Raises:
            InputError: `strict`, and an entry of this rank is missing or one is not of the model.
        """
        self._state.load(state_dict, self._is_here, strict=strict)

    def _held_parameters(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self._state.parameters().items() if self._is_here(n)}

    def _is_here(self, name: str) -> bool:
        """Whether this process holds the parameter or buffer of that canonical name."""
        ranks = self._driver.ranks
        return self._driver.is_whole or any(
            self._placement[s] in ranks for s in self._owner_stages(name)
        )

    def _owner_rank(self, name: str) -> int:
        return self._placement[self._owner_stages(name)[0]]

    def _owner_stages(self, name: str) -> tuple[int, ...]:
        # What no stage reads, the first one keeps: it is saved and loaded, and never gets a
        # gradient.
        return self._require_compiled().owners.get(name, (0,))

    # ---------------------------------------------------------------------------------------
    # Looking inside

    @property
    def compiled(self) -> bool:
        """Whether the model has been traced and cut."""
        return self._first is not None

    @property
    def steps(self) -> tuple[Step, ...]:
        """What each pass did to the graph: its text before and after."""
        return self._require_compiled().steps

    def graph(self, stage: int) -> fx.GraphModule:
        """The graph of one stage, with its send and recv nodes."""
        self._check_index("stage", stage, self.options.stages)
        return self._require_compiled().stage_graphs[stage].module

    def output_dims(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int | None, ...]:
        """Along which dimension the microbatches of a batch join, for each leaf of its output.

        Returns:
            None for a leaf without rows, which is as the first microbatch gives it.
        """
        bound = self._binder.bind(args, kwargs)
        compiled, _ = self._compile(bound, tuple(args), kwargs)
        dims = compiled.batch_dims
        piece = dims.split(bound.tensors, self._microbatches(dims.rows(bound.tensors)))[0]
        return compiled.probe.output_dims(piece, dims.dims)

    def program(self, rank: int) -> tuple[Action, ...]:
        """The actions of one rank, transfers included."""
        self._check_index("rank", rank, self.options.ranks)
        return self.plan.program[rank]

    def code(
        self,
        rank: int,
        *,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        target: Any = None,
        unroll: bool = False,
    ) -> str:
        """The script of one rank, as `emit` writes it for the same arguments."""
        from fxpipe.emit.script import rank_code

        self._check_index("rank", rank, self.options.ranks)
        compiled, plan, example = self._to_emit(args, kwargs, target)
        return rank_code(compiled, plan, rank, options=self.options, example=example, unroll=unroll)

    @property
    def plan(self) -> Plan:
        """What was decided: cuts, schedule, costs and transfers of every stage."""
        compiled, count = self._require_compiled(), self._planned_microbatches
        return make_plan(compiled, self.options, count, training=self._first_training)

    def report(self) -> str:
        """The plan as text."""
        return self.plan.report()

    def simulate(self) -> Timeline:
        """One step as predicted from the estimated costs of the stages."""
        return self.plan.simulate()

    def emit(
        self,
        folder: str | Path,
        *,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        target: Any = None,
        unroll: bool = False,
    ) -> Path:
        """Writes scripts that run the pipeline without the compiler, and the state they start from.

        Under torchrun each rank calls it and writes its own files.

        Args:
            folder: made if it is not there.
            args: positional inputs of a batch, which is saved with the scripts. None, as `kwargs`:
                no batch is saved, and the scripts are for microbatches like the one that was
                traced.
            kwargs: its keyword inputs.
            target: what the loss compares with. The loss is traced with it; without one it is
                imported by the script, if it has to be.
            unroll: the order of actions without loops, one line an action.

        Returns:
            Path of ``run.py``, to be started by ``torchrun --nproc-per-node <ranks>``.

        Raises:
            FxpipeError: the model or its loss cannot be written down, or nothing is compiled yet
                and no batch is given.
        """
        from fxpipe.emit.script import emit

        compiled, plan, example = self._to_emit(args, kwargs, target)
        return emit(
            compiled,
            plan,
            Path(folder),
            options=self.options,
            ranks=self._driver.ranks,
            example=example,
            unroll=unroll,
        )

    def _to_emit(
        self, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None, target: Any
    ) -> tuple[Compiled, Plan, Example | None]:
        """What scripts for this batch are made of; of the first batch if none is given."""
        from fxpipe.emit.script import Example

        if args is None and kwargs is None:
            if target is not None:
                raise OptionError("a target is given without its batch", hint="pass args= too")
            return self._require_compiled(), self.plan, None
        given, named = tuple(args or ()), dict(kwargs or {})
        bound = self._binder.bind(given, named)
        compiled, _ = self._compile(bound, given, named)
        count = self._microbatches(compiled.batch_dims.rows(bound.tensors))
        plan = make_plan(compiled, self.options, count, training=self.training)
        return compiled, plan, Example(bound.tensors, target)

    def _check_index(self, what: str, index: int, count: int) -> None:
        if not 0 <= index < count:
            raise OptionError(f"there is no {what} {index}", hint=f"{what}s are 0 to {count - 1}")

    def _require_compiled(self) -> Compiled:
        if self._first is None:
            raise FxpipeError(
                "the pipeline is not compiled yet: no batch has been seen",
                hint="pass example_inputs=(args, kwargs) to compile, or run a step first",
            )
        return self._first

    # ---------------------------------------------------------------------------------------
    # Compiling

    def _session(
        self,
        bound: BoundInputs,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        loss: LossPlace,
        *,
        with_backward: bool,
    ) -> Session:
        compiled, held = self._compile(bound, args, kwargs)
        rows = compiled.batch_dims.rows(bound.tensors)
        count = self._microbatches(rows)
        key = (id(compiled), count, loss, with_backward)
        if key not in self._sessions:
            self._sessions[key] = Session(
                compiled,
                held,
                self.options,
                self._driver,
                microbatches=count,
                loss=loss,
                with_backward=with_backward,
            )
        return self._sessions[key]

    def _microbatches(self, rows: int) -> int:
        wanted = self.options.wanted_microbatches
        if rows < wanted and self.options.microbatches is not None:
            warn_once(
                log, "a batch of %d rows is cut into %d microbatches, not %d", rows, rows, wanted
            )
        return min(wanted, rows)

    def _compile(
        self, bound: BoundInputs, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Variant:
        """The graph for this mode, and these inputs; traced if there is none yet."""
        mode = tuple(self._training.values())
        frozen = tuple(p.requires_grad for p in self._model.parameters())

        def pieces(compiled: Compiled) -> list[list[Tensor]]:
            dims = compiled.batch_dims
            return dims.split(bound.tensors, self._microbatches(dims.rows(bound.tensors)))

        def make() -> Variant:
            example = first_microbatch(self._model, args, kwargs, self.options)
            return self._make(example, bound)

        return self._variants.choose((mode, frozen, bound.key), bound.tensors, pieces, make)

    def _make(self, example: Microbatch, bound: BoundInputs) -> Variant:
        compiled = self._compile_on(example)
        if self._first is None:
            self._first, self._first_training = compiled, self.training
            self._planned_microbatches = self._microbatches(compiled.batch_dims.rows(bound.tensors))
        held = hold(
            compiled,
            self._placement,
            self._driver.ranks,
            self._state,
            self._driver.device,
            self._weights,
        )
        self._sessions = {
            key: session
            for key, session in self._sessions.items()
            if session.compiled in self._variants
        }
        return Variant(compiled, held)

    def _compile_on(self, example: Microbatch) -> Compiled:
        with modes(self._model, self._training):
            compiled = compile_model(
                self._model,
                example,
                self.options,
                canonical=self._state.canonical,
                training=self.training,
                like=self._first,
            )
            wanted = self.options.verify
            if is_small(self._model) if wanted is None else wanted:
                self_check(
                    self._model,
                    compiled,
                    example.args,
                    example.kwargs,
                    self._state.canonical,
                    training=self.training,
                )
        return compiled


def _placement(options: CompileOptions) -> tuple[int, ...]:
    """Rank of every stage, whatever the number of microbatches."""
    schedule = make_schedule(
        options.schedule, stages=options.stages, chunks=options.chunks, microbatches=1
    )
    return schedule.placement

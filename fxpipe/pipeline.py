"""The pipeline object: what ``compile`` returns and users train with."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from fxpipe import tree
from fxpipe.builder import Builder
from fxpipe.errors import FxpipeError, OptionError
from fxpipe.inspection import Inspection
from fxpipe.loop import with_gradients
from fxpipe.options import CompileOptions
from fxpipe.runtime.clip import clip_grad_norm
from fxpipe.runtime.driver import Driver, make_driver
from fxpipe.runtime.scaler import GradScaler
from fxpipe.runtime.state import ModelState
from fxpipe.runtime.stepper import LossPlace
from fxpipe.runtime.timing import Stopwatch
from fxpipe.schedule import Timeline
from fxpipe.session import StepResult

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Pipeline(Inspection):
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
        self._state = ModelState(model)
        if options.verify and self._state.is_meta:
            raise OptionError(
                "a model on the meta device cannot be verified: it has no values",
                at="verify=True",
                hint="verify a small model of the same kind",
            )
        device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
        self._driver: Driver = make_driver(options.transport, options.ranks, mesh, device)
        self._builder = Builder(model, options, self._driver, self._state)
        self._stopwatch: Stopwatch | None = None
        if example_inputs is not None:
            args, kwargs = self._on_device(example_inputs)
            self._builder.variant(self._builder.binder.bind(args, kwargs), args, kwargs)

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
        binder = self._builder.binder
        if "target" in binder.signature.parameters:
            kwargs["target"] = target  # the model computes the loss itself
        args, kwargs, target = self._on_device((args, kwargs, target))
        bound, place = binder.bind(args, kwargs), LossPlace.INSIDE
        session = self._builder.session(bound, args, kwargs, place, with_backward=backward)
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
        bound = self._builder.binder.bind(args, kwargs)
        if not (self.training and torch.is_grad_enabled()):
            place = LossPlace.NOWHERE
            session = self._builder.session(bound, args, kwargs, place, with_backward=False)
            return session.run(bound.tensors, None, self._stopwatch).output
        session = self._builder.session(bound, args, kwargs, LossPlace.OUTSIDE, with_backward=True)
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
        self._builder.training = dict.fromkeys(self._builder.training, mode)
        return self

    def eval(self) -> Self:
        """Puts the pipeline, not the model that was handed in, in eval mode."""
        return self.train(False)

    @property
    def training(self) -> bool:
        """Whether the model as a whole is in train mode."""
        return bool(self._builder.training[""])

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
            self._builder.placement[s] in ranks for s in self._builder.owner_stages(name)
        )

    def _owner_rank(self, name: str) -> int:
        return self._builder.placement[self._builder.owner_stages(name)[0]]

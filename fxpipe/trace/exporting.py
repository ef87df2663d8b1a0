"""Runs torch.export on a model, and keeps or refuses what it would lose without a word.

The model holds fake parameters and buffers meanwhile. torch.export by itself takes a custom
``autograd.Function`` for the operators of its forward, forgets activation checkpoints, copies
parameters that are not registered, drops what is assigned to a buffer of a submodule, and runs
in-place operators on tensors that are plain attributes.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.export import Dim
from torch.overrides import TorchFunctionMode

from fxpipe import compat
from fxpipe.trace.assignments import check_assigned, leak
from fxpipe.trace.inputs import BoundInputs, InputBinder
from fxpipe.trace.proxies import UntraceableError
from fxpipe.trace.regions import Regions, regions_exported
from fxpipe.trace.source import current_line, inside_compiler
from fxpipe.trace.state import FakeState
from fxpipe.trace.tracer import output_leaf
from fxpipe.trace.type_checks import type_checks_see_values
from fxpipe.tree import TreeSpec, flatten

REGION = "fxpipe.checkpoint"
"""Key under which a node of an exported graph carries the number of its checkpoint region."""

LINE = "fxpipe.line"
"""Key under which it carries the user's line; torch.export notes that of the module's forward."""

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""What stands for a number while a model is exported."""

# recurrent layers keep a second list of their weights
_OWN_LISTS = ("_flat_weights", "_flat_weight_refs")


class Slot(NamedTuple):
    """Stands for one output of the exported graph."""

    position: int


@dataclass
class Exported:
    """An exported model.

    Args:
        state: knows the names of the fakes that `module` holds.
        module: returns the tensors and sizes among the leaves of the model's result, and then the
            values of the buffers that were assigned.
        output: structure of the model's result.
        leaves: of the result; a `Slot` for what the graph returns.
        assigned: first names of these buffers.
    """

    state: FakeState
    module: fx.GraphModule = field(init=False)
    output: TreeSpec = field(init=False)
    leaves: list[Any] = field(default_factory=list)
    assigned: tuple[str, ...] = ()


def export(
    model: nn.Module,
    device: torch.device,
    binder: InputBinder,
    bound: BoundInputs,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    dynamic: bool,
) -> Exported:
    """Exports ``model(*args, **kwargs)`` as a function of the tensors of the batch.

    Args:
        model: is as before afterwards.
        device: to trace on.
        binder: of the model.
        bound: the batch, bound.
        args: as the model is called.
        kwargs: likewise.
        dynamic: leave sizes open where the model allows it.
    """
    with compat.export_mode() as mode:
        found = Exported(FakeState(model, mode, device))
        run = _Run(model, found)

        def call(inputs: Sequence[Tensor]) -> tuple[Any, ...]:
            tensors = iter(inputs)
            leaves = [next(tensors) if isinstance(x, Tensor) else x for x in bound.leaves]
            called = binder.call_form(bound.structure.unflatten(leaves), args, kwargs)
            return run.call_model(*called)

        inputs = tuple(_example(tensor, device) for tensor in bound.tensors)
        sizes = tuple((Dim.AUTO,) * tensor.dim() for tensor in inputs)
        found.state.install(attributes=True)
        try:
            with torch.enable_grad(), _quiet(), compat.annotations_kept():
                program = torch.export.export(
                    _Root(model, call),
                    inputs,
                    strict=False,
                    dynamic_shapes=(sizes,) if dynamic else None,
                )
                found.module = program.module()
        finally:
            found.state.restore()
    return found


class _Root(nn.Module):
    """Takes the tensors of a batch alone, so that structure and constants are our business."""

    def __init__(self, model: nn.Module, call: Callable[[Sequence[Tensor]], Any]) -> None:
        super().__init__()
        self.model = model
        self._run = call

    def forward(self, *inputs: Tensor) -> Any:
        return self._run(inputs)


class _Run:
    """Calls the model while it is exported, and notes what came of it."""

    def __init__(self, model: nn.Module, found: Exported) -> None:
        self._model, self._found = model, found
        self._prefixes = {id(m): f"{n}." if n else "" for n, m in model.named_modules()}
        buffers = model.named_buffers(remove_duplicate=False)
        self._first_names = {n: str(found.state.name_of(buffer)) for n, buffer in buffers}
        self._regions = Regions()
        self._assigned: dict[str, Tensor] = {}

    @property
    def busy(self) -> int:
        return inside_compiler()

    def call_model(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Returns tensors and sizes alone; the rest is noted."""
        with (
            type_checks_see_values(self._model),
            regions_exported(self),
            self._assignments_noted(),
            _Watch(),
            compat.export_hidden(),
        ):
            result = self._model(*args, **kwargs)
        self._refuse_leaks()
        leaves, self._found.output = flatten(result)
        outputs: list[Any] = []
        self._found.leaves = []
        for leaf in leaves:
            returned = isinstance(leaf, (Tensor, *SYMBOLS))
            self._found.leaves.append(Slot(len(outputs)) if returned else _constant(leaf))
            outputs += [leaf] if returned else []
        self._found.assigned = tuple(self._assigned)
        return (*outputs, *self._assigned.values())

    @contextlib.contextmanager
    def checkpoint_region(self) -> Iterator[None]:
        with self._regions.opened():
            region = self._regions.current
            assert region is not None
            with compat.nodes_annotated(REGION, region):
                yield

    @contextlib.contextmanager
    def _assignments_noted(self) -> Iterator[None]:
        original = nn.Module.__setattr__

        def set_attribute(module: nn.Module, name: str, value: Any) -> None:
            buffer = compat.state_of(module)[1].get(name)
            if buffer is not None and value is not buffer and id(module) in self._prefixes:
                check_assigned(name, buffer, value)
                self._assigned[self._first_names[self._prefixes[id(module)] + name]] = value
            original(module, name, value)

        nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.__setattr__ = original  # type: ignore[method-assign]

    def _refuse_leaks(self) -> None:
        state = self._found.state
        for change in (*state.changed_attributes(), *state.registered()):
            tensors = [x for x in flatten(change.value)[0] if isinstance(x, Tensor)]
            if change.name not in _OWN_LISTS and any(state.name_of(x) is None for x in tensors):
                raise leak(change)


called_by = _Run.call_model.__code__
"""Code of the function that calls the model."""


_SETS = {getattr(Tensor, name).__set__: name for name in ("data", "grad")}


class _Watch(TorchFunctionMode):
    """Refuses calls of which torch.export would lose an effect; notes the line of the others."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SETS:
            raise UntraceableError(f"assigns .{_SETS[func]} of a tensor in its forward")
        if func is Tensor.register_hook:
            raise UntraceableError("registers a hook on a tensor in its forward")
        if kwargs.get("generator") is not None:
            raise UntraceableError("draws random numbers from a generator of its own")
        for leaf in flatten((args, kwargs))[0]:
            if isinstance(leaf, nn.Parameter) and not isinstance(leaf, compat.FakeTensor):
                raise UntraceableError(
                    "reads a parameter that is not registered in the model",
                    "register it with the module that uses it",
                )
        with compat.nodes_annotated(LINE, current_line(called_by)):
            return func(*args, **kwargs)


def _constant(leaf: Any) -> Any:
    if isinstance(leaf, torch.Size) and any(isinstance(n, SYMBOLS) for n in leaf):
        raise UntraceableError("returns a torch.Size", "return it as a tuple")
    return output_leaf(leaf)


def _example(tensor: Tensor, device: torch.device) -> Tensor:
    if not tensor.is_meta:
        return tensor.detach().requires_grad_(tensor.requires_grad)
    zeros = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
    return zeros.requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps to itself what torch logs about an export that fails: the error is reported by us."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)

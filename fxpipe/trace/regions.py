"""Keeps the regions of the user's code in the graph while it is traced.

An autocast block becomes a node that opens it and one that closes it; what switches gradients off
and on becomes a node; a custom ``autograd.Function`` becomes one node, since fx would record its
forward and lose its backward; the nodes of an activation checkpoint are marked with its number.
Regions that no node stands for are refused.

torch.export keeps the first two kinds by itself, and would lose the others without a word.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.attention
import torch.utils.checkpoint
from torch.utils.checkpoint import CheckpointFunction

from fxpipe.compat import (
    ATTENTION_KERNELS,
    CHECKPOINT_GENERATORS,
    autocast_arguments,
    bound_apply,
    enter_autocast,
    exit_autocast,
)
from fxpipe.trace.proxies import UntraceableError, proxies_in

if TYPE_CHECKING:
    from fxpipe.trace.tracer import ValueTracer


@contextlib.contextmanager
def regions_recorded(tracer: ValueTracer) -> Iterator[None]:
    """While inside, regions that the model's code opens become part of the tracer's graph."""
    with (
        _autocast_recorded(tracer),
        _functions_recorded(tracer),
        _checkpoints_marked(tracer),
        _others_refused(tracer),
    ):
        yield


class Recorder(Protocol):
    """Whoever captures a model: a tracer, or a run of torch.export."""

    @property
    def busy(self) -> int:
        """Not 0 while what runs is no code of the model's that is captured."""
        ...

    def checkpoint_region(self) -> contextlib.AbstractContextManager[None]:
        """Marks the nodes made inside as one activation checkpoint region."""
        ...


@contextlib.contextmanager
def regions_exported(recorder: Recorder) -> Iterator[None]:
    """While inside, checkpoint regions are marked, and what torch.export would lose is refused."""
    with _functions_refused(recorder), _checkpoints_marked(recorder), _others_refused(recorder):
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    original = vars(owner)[name]
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def _autocast_recorded(tracer: ValueTracer) -> Iterator[None]:
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__
    opened: dict[int, list[Any]] = {}  # by region, since one object may be entered again

    @functools.wraps(enter)
    def record_enter(self: torch.autocast) -> Any:
        if not tracer.busy:
            node = tracer.record_region(enter_autocast, autocast_arguments(self))
            opened.setdefault(id(self), []).append(node)
        return enter(self)  # type: ignore[no-untyped-call]

    @functools.wraps(leave)
    def record_exit(self: torch.autocast, *error: Any) -> Any:
        if not tracer.busy and opened.get(id(self)):
            tracer.record_region(exit_autocast, (opened[id(self)].pop(),))
        return leave(self, *error)

    with (
        _replaced(torch.autocast, "__enter__", record_enter),
        _replaced(torch.autocast, "__exit__", record_exit),
    ):
        yield


@contextlib.contextmanager
def _functions_recorded(tracer: ValueTracer) -> Iterator[None]:
    original = vars(torch.autograd.Function)["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if tracer.busy or not proxies_in((args, kwargs)):
            return original.__get__(None, cls)(*args, **kwargs)
        if cls is CheckpointFunction:
            run, _, *inputs = args
            with tracer.checkpoint_region():
                return run(*inputs)
        name = _snake(cls.__name__)
        return tracer.record("call_function", bound_apply(cls), args, kwargs, name=name)

    with _replaced(torch.autograd.Function, "apply", classmethod(apply)):
        yield


@contextlib.contextmanager
def _functions_refused(recorder: Recorder) -> Iterator[None]:
    original = vars(torch.autograd.Function)["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            run, _, *inputs = args
            with recorder.checkpoint_region():
                return run(*inputs)
        if torch.is_grad_enabled() and not recorder.busy:
            raise UntraceableError(
                f"calls the autograd.Function {cls.__name__}, whose backward torch.export loses"
            )
        return original.__get__(None, cls)(*args, **kwargs)

    with _replaced(torch.autograd.Function, "apply", classmethod(apply)):
        yield


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


@contextlib.contextmanager
def _checkpoints_marked(recorder: Recorder) -> Iterator[None]:
    def without_reentry(*args: Any, **kwargs: Any) -> Iterator[None]:
        with recorder.checkpoint_region():
            yield

    with contextlib.ExitStack() as stack:
        for name in CHECKPOINT_GENERATORS:
            original = getattr(torch.utils.checkpoint, name)
            chosen = _outside_leaves(recorder, original, without_reentry)
            stack.enter_context(_replaced(torch.utils.checkpoint, name, chosen))
        yield


def _outside_leaves(
    recorder: Recorder, original: Callable[..., Any], replacement: Callable[..., Any]
) -> Callable[..., Any]:
    def choose(*args: Any, **kwargs: Any) -> Any:
        return (original if recorder.busy else replacement)(*args, **kwargs)

    return choose


_NO_SEED = "leave seeds to the training script"
_REFUSED: tuple[tuple[Any, str, str, str], ...] = (
    (torch.inference_mode, "__enter__", "opens torch.inference_mode", "use torch.no_grad instead"),
    (torch, "manual_seed", "seeds the random numbers", _NO_SEED),
    (torch, "set_rng_state", "sets the state of the random numbers", _NO_SEED),
    (torch.random, "fork_rng", "forks the state of the random numbers", _NO_SEED),
    (torch.nn.attention, ATTENTION_KERNELS, "chooses attention kernels", "do so around the step"),
)


@contextlib.contextmanager
def _others_refused(recorder: Recorder) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for owner, name, problem, hint in _REFUSED:
            original = getattr(owner, name)
            refuse = _refusal(UntraceableError(f"{problem} in its forward", hint))
            chosen = _outside_leaves(recorder, original, refuse)
            stack.enter_context(_replaced(owner, name, chosen))
        yield


def _refusal(error: UntraceableError) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise error

    return refuse


class Regions:
    """Numbers the activation checkpoint regions, and knows the outermost that is open."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._open: list[int] = []

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        self._open.append(next(self._numbers))
        try:
            yield
        finally:
            self._open.pop()

    @property
    def current(self) -> int | None:
        """A region inside another is recomputed with it, so the outer one counts."""
        return self._open[0] if self._open else None

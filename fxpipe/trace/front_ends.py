"""Tries the ways to capture a model, best first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from fxpipe.errors import OptionError, TraceError
from fxpipe.trace.exported import trace_by_export
from fxpipe.trace.symbolic import trace_symbolically
from fxpipe.trace.traced import Traced

FrontEnd = Callable[
    [nn.Module, Sequence[Any], Mapping[str, Any], Sequence[str | type[nn.Module]]], Traced
]

FRONT_ENDS: tuple[FrontEnd, ...] = (trace_symbolically, trace_by_export)
"""In the order in which they are tried; each raises `TraceError` where it cannot."""

_SHOWN = 120  # characters of the error of a front end that was tried in vain


def trace(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    leaf_modules: Sequence[str | type[nn.Module]] = (),
) -> Traced:
    """Captures ``model(*args, **kwargs)`` as a graph, without touching data or changing the model.

    Args:
        model: on any device, also meta; traced in the train or eval mode it is in.
        args: an example batch. Of tensors, only shape, dtype, device and requires_grad are read.
        kwargs: likewise.
        leaf_modules: FQNs or classes of modules to keep as one node each.

    Raises:
        TraceError: no front end can capture it; the error is that of the first, and its hint names
            that of the others.
        InputError: the arguments do not bind to the model's forward.
        OptionError: `leaf_modules` names no module.
    """
    known = {name for name, _ in model.named_modules() if name}
    for leaf in leaf_modules:
        if isinstance(leaf, str) and leaf not in known:
            raise OptionError(
                f"leaf module {leaf!r} names no module of {type(model).__name__}",
                at=f"leaf_modules={list(leaf_modules)}",
                hint=f"modules are: {', '.join(sorted(known)[:20])}",
            )
    failures: list[TraceError] = []
    for front_end in FRONT_ENDS:
        try:
            traced = front_end(model, args, kwargs, leaf_modules)
        except TraceError as error:
            failures.append(error)
            continue
        reasons = [f"fx: {failures[0].problem}"] if failures else []
        return dataclasses.replace(traced, why="; ".join(filter(None, [*reasons, traced.why])))
    first, *others = failures
    tried = "; ".join(f"torch.export cannot take it either: {_short(e.problem)}" for e in others)
    raise TraceError(
        first.problem, at=first.at, hint="; ".join(filter(None, [first.hint, tried]))
    ) from (first.__cause__ or first)


def _short(problem: str) -> str:
    return problem if len(problem) <= _SHOWN else f"{problem[:_SHOWN].rstrip()}..."

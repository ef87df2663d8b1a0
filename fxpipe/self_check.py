"""Compares the stages with the plain model on the example batch, before anything is trained."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from fxpipe import tree
from fxpipe.compiler import Compiled
from fxpipe.errors import TraceError
from fxpipe.log import warn_once

log = logging.getLogger(__name__)

_Found: TypeAlias = dict[str, Tensor | None]
"""What one microbatch left behind: outputs, gradients and buffers, by name."""

_M = TypeVar("_M", bound=nn.Module)

SMALL_ELEMENTS = 20_000_000
"""Parameters of a model that is checked without being asked: a copy and three runs, in seconds."""


def is_small(model: nn.Module) -> bool:
    """Whether the model has its values, and few enough to be checked by default."""
    tensors = [*model.parameters(), *model.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        return False
    return sum(tensor.numel() for tensor in tensors) <= SMALL_ELEMENTS


def self_check(
    model: nn.Module,
    compiled: Compiled,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    canonical: Mapping[str, str],
    *,
    training: bool,
) -> None:
    """Runs one microbatch through copies of model and stages, with the same random numbers.

    Compared are every leaf of the output, every gradient and every buffer. A model that fails on
    the batch, or does not give the same numbers twice, is not checked.

    Args:
        model: in the mode it was compiled in; neither it nor the random state is changed.
        compiled: its stages.
        args: positional inputs, one microbatch.
        kwargs: keyword inputs, one microbatch.
        canonical: first name of the same tensor, for every name of a parameter or buffer.
        training: compare gradients too.

    Raises:
        TraceError: the numbers differ by more than rounding; what differs is named.
    """
    inputs = compiled.traced.inputs.bind(args, kwargs)
    try:
        plain, again = (_run_model(model, args, kwargs, training=training) for _ in range(2))
    except Exception as error:  # the step will raise it, and say where
        log.info("model=%s not checked: %s", type(model).__name__, error)
        return
    if _differing(plain, again):
        log.info("model=%s not checked: it gives other numbers each time", type(model).__name__)
        return
    staged = _run_stages(compiled, inputs, canonical, training=training)
    unread = {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
    staged = {**unread, **staged}
    if not (differing := _differing(plain, staged)):
        return
    worst = [n for n in differing if not _is_close(plain[n], staged.get(n))]
    shown = ", ".join((worst or differing)[:5])
    if not worst:
        warn_once(
            log,
            "the stages of %s differ from the plain model by rounding: %s",
            type(model).__name__,
            shown,
        )
        return
    raise TraceError(
        f"the stages of {type(model).__name__} give other numbers than the plain model",
        at=f"{len(worst)} of {len(plain)} compared differ: {shown}",
        hint="its forward does something that a graph does not show: keep the module that does it "
        "whole with leaf_modules=, or pass verify=False if the difference is wanted",
    )


def _run_model(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, training: bool
) -> _Found:
    model = _copied(model, args, kwargs)
    with _apart(training):
        args, kwargs = copy.deepcopy((args, kwargs))  # it may write them
        leaves, _ = tree.flatten(model(*args, **kwargs))
        _backward(leaves, training=training)
    return _found(leaves, model.named_parameters(), model.named_buffers())


def _run_stages(
    compiled: Compiled, inputs: Sequence[Tensor], canonical: Mapping[str, str], *, training: bool
) -> _Found:
    """One microbatch through all stages, in one autograd graph."""
    stages = nn.ModuleList(stage.module for stage in compiled.stages)
    modules = _copied(stages, inputs, {})  # in one copy, so that shared state stays shared
    sizes = compiled.probe.layout(inputs).sizes
    written = copy.deepcopy(list(inputs))  # the stages may write them
    carried: dict[int, Tensor] = {}
    leaves: Sequence[Any] = ()
    with _apart(training):
        for stage, module in zip(compiled.stages, modules, strict=True):
            received = [
                carried[r.edge].clone() if r.written else carried[r.edge] for r in stage.receives
            ]
            read = [written[i] for i in stage.batch_inputs]
            outputs = module(*read, *(sizes[i] for i in stage.sizes), *received)
            for send in stage.sends:
                carried[send.edge] = outputs[send.output]
            leaves = outputs[stage.num_sent :]
        _backward(leaves, training=training)
    parameters = [(canonical.get(n, n), p) for m in modules for n, p in m.named_parameters()]
    buffers = [(canonical.get(n, n), b) for m in modules for n, b in m.named_buffers()]
    return _found(leaves, parameters, buffers)


def _copied(module: _M, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _M:
    """A copy on the device of the inputs."""
    leaves, _ = tree.flatten((list(args), dict(kwargs)))
    devices = [leaf.device for leaf in leaves if isinstance(leaf, Tensor)]
    return copy.deepcopy(module).to(devices[0]) if devices else copy.deepcopy(module)


@contextlib.contextmanager
def _apart(training: bool) -> Iterator[None]:
    """The same random numbers for every run, and none of it visible outside."""
    with torch.random.fork_rng(), torch.set_grad_enabled(training):
        torch.manual_seed(0)
        yield


def _backward(leaves: Sequence[Any], *, training: bool) -> None:
    """Backward from every leaf at once, each with a gradient that tells its elements apart."""
    roots = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    if training and roots:
        torch.autograd.backward(roots, [torch.rand_like(root.detach()) for root in roots])


def _found(
    leaves: Sequence[Any],
    parameters: Iterable[tuple[str, nn.Parameter]],
    buffers: Iterable[tuple[str, Tensor]],
) -> _Found:
    found: _Found = {
        f"output leaf {i}": x.detach() for i, x in enumerate(leaves) if isinstance(x, Tensor)
    }
    found |= {f"gradient of {name}": parameter.grad for name, parameter in parameters}
    found |= {f"buffer {name}": buffer for name, buffer in buffers}
    return found


def _differing(want: _Found, got: _Found) -> list[str]:
    """Names of what is not equal bit for bit."""
    return [name for name, value in want.items() if not _same(value, got.get(name))]


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        # no gradient, and a gradient of zeros, train alike
        return all(x is None or not bool(x.any()) for x in (a, b))
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())


def _is_close(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    loose = 1e-2 if a.dtype in (torch.bfloat16, torch.float16) else 1e-4
    scale = float(a.abs().max()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=loose, atol=loose * max(scale, 1e-12), equal_nan=True)

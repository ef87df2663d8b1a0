"""The plain model over the microbatches of a pipeline, and whether both give the same bits."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe import Pipeline, StepResult, tree


def step(
    model: nn.Module,
    args: tuple[Tensor, ...],
    target: Any,
    loss: Callable[[Any, Any], Tensor],
    microbatches: int,
    reduction: str = "mean",
    rows_dim: int = 0,
) -> StepResult:
    """Runs each microbatch forward and, in train mode, backward; adds to the gradients."""
    rows = args[0].shape[rows_dim]
    pieces = zip(*(a.tensor_split(microbatches, dim=rows_dim) for a in args), strict=True)
    total: Tensor | None = None
    outputs: list[list[Any]] = []
    spec = tree.flatten(None)[1]
    for piece, wanted in zip(pieces, split(target, microbatches), strict=True):
        weight = piece[0].shape[rows_dim] / rows if reduction == "mean" else 1.0
        output = model(*(a.clone() for a in piece))
        value = loss(output, wanted)
        if model.training:
            (value * weight).backward()
        part = value.detach() * weight
        total = part if total is None else total + part
        leaves, spec = tree.flatten(output)
        outputs.append(leaves)
    joined = [torch.cat([x.detach() for x in leaves]) for leaves in zip(*outputs, strict=True)]
    return StepResult(total, spec.unflatten(joined))


def split(target: Any, microbatches: int) -> list[Any]:
    return [None] * microbatches if target is None else list(target.tensor_split(microbatches))


def assert_same(pipe: Pipeline, model: nn.Module, got: StepResult, want: StepResult) -> None:
    """Loss, output, gradients and buffers are equal bit for bit."""
    assert got.loss is not None
    assert want.loss is not None
    assert torch.equal(got.loss, want.loss), f"loss {got.loss} is not {want.loss}"
    assert_equal("output", dict(enumerate(tree.flatten(got.output)[0])), leaves(want.output))
    gradients = {n: p.grad for n, p in model.named_parameters()}
    assert_equal("gradient", {n: p.grad for n, p in pipe.named_parameters()}, gradients)
    assert_equal("buffer", dict(pipe.named_buffers()), dict(model.named_buffers()))


def leaves(output: Any) -> dict[Any, Any]:
    return dict(enumerate(tree.flatten(output)[0]))


def assert_equal(what: str, got: Mapping[Any, Any], want: Mapping[Any, Any]) -> None:
    assert list(got) == list(want), f"other {what}s"
    for name, value in want.items():
        if value is None:
            assert got[name] is None, f"{what} {name}"
        else:
            assert got[name] is not None, f"{what} {name} is None"
            assert torch.equal(got[name], value), f"{what} {name}: {got[name] - value}"

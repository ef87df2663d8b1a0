"""The plain training loop: a call whose output has gradients, so that ``backward()`` works."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxpipe.runtime.stepper import Resume


def with_gradients(
    leaves: Sequence[Any], needs_gradient: Sequence[bool], resume: Resume
) -> list[Any]:
    """The leaves of a batch's output, from which backward leads into the pipeline.

    Args:
        leaves: of the output of the batch.
        needs_gradient: for each leaf, whether the model's own output would have a gradient there.
        resume: runs backward, given the gradient of each leaf.

    Returns:
        The leaves; those that need a gradient have one ``grad_fn`` in common.
    """
    found = list(leaves)
    chosen = [i for i, needed in enumerate(needs_gradient) if needed]
    if chosen:
        # no leaf requires a gradient by itself: the parameters are out of this graph's sight
        anchor = torch.zeros((), requires_grad=True)
        outputs = _Backward.apply(resume, len(found), chosen, anchor, *[found[i] for i in chosen])
        for i, output in zip(chosen, outputs, strict=True):
            found[i] = output
    return found


class _Backward(torch.autograd.Function):
    """Passes the outputs on; its backward is that of the pipeline."""

    @staticmethod
    def forward(
        ctx: Any, resume: Resume, count: int, chosen: list[int], anchor: Tensor, *leaves: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.resume, ctx.count, ctx.chosen = resume, count, chosen
        ctx.set_materialize_grads(False)
        return tuple(leaf.view_as(leaf) for leaf in leaves)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        by_leaf: list[Tensor | None] = [None] * ctx.count
        for i, gradient in zip(ctx.chosen, gradients, strict=True):
            by_leaf[i] = gradient
        ctx.resume(by_leaf)
        return (None,) * (4 + len(gradients))

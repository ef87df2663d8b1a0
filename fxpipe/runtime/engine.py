"""Engines: how one stage runs forward and backward. The executor does not know which it drives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fxpipe import compat
from fxpipe.runtime.stage import Stage


class Engine(Protocol):
    """Runs the compute of one stage, one microbatch at a time."""

    def forward(self, microbatch: int, inputs: list[Any]) -> Sequence[Any]:
        """Runs F and keeps what backward needs.

        Args:
            microbatch: m.
            inputs: values of the stage's placeholders, in order. The engine may empty the list.

        Returns:
            The stage's outputs, in order.
        """
        ...

    def backward(
        self,
        microbatch: int,
        gradients: Sequence[Tensor | None],
        later: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """Runs B, or its input-gradient half, and adds to the gradients of the parameters.

        Args:
            microbatch: m; its F has run.
            gradients: one for each of the stage's `gradients`, in order; then, on the last stage,
                that of the loss, or those of the leaves of the model's output.
            later: for each of the stage's receives, then for each of its tied links, the gradient
                that a later stage sent: the sum of this one starts with it. None where there is
                none.

        Returns:
            For each of the stage's receives, then for each of its tied links, its gradient; None
            where there is none.
        """
        ...

    def weight(self, microbatch: int) -> None:
        """Runs W, the weight-gradient half of backward; its I has run."""
        ...

    def drop(self) -> None:
        """Forgets the microbatches under way."""
        ...


class AutogradEngine:
    """Eager forward, and backward by the autograd engine: the oracle for every other engine.

    Backward is fused: ``backward`` computes the gradients of inputs and weights together, and
    ``weight`` has nothing left to do.

    Args:
        stage: the stage to run.
        has_backward: keep what backward needs; False for forward-only programs.
        tied: the parameter of each of the stage's tied links.
    """

    def __init__(
        self, stage: Stage, *, has_backward: bool, tied: Sequence[nn.Parameter] = ()
    ) -> None:
        self._forward = stage.module.forward  # past Module.__call__: no hooks stand on a stage
        self._first_receive = len(stage.batch_inputs) + len(stage.sizes)
        self._has_backward = has_backward
        self._leaves = tuple(
            (i, self._first_receive + i, r.written)
            for i, r in enumerate(stage.receives)
            if r.gradient_to is not None
        )
        self._num_receives = len(stage.receives)
        self._tied = tuple(
            (len(stage.receives) + i, parameter, link.gradient_to is not None)
            for i, (parameter, link) in enumerate(zip(tied, stage.tied, strict=True))
        )
        self._roots = tuple(g.output for g in stage.gradients)
        if stage.has_loss:
            self._roots += (-1,)
        self._num_sent = stage.num_sent if stage.takes_output_gradients else None
        self._kept: dict[int, tuple[list[tuple[int, Tensor]], list[Tensor]]] = {}

    def forward(self, microbatch: int, inputs: list[Any]) -> Sequence[Any]:
        if not self._has_backward:
            with torch.no_grad():
                return self._forward(*inputs)  # type: ignore[no-any-return]
        leaves = []
        for i, position, written in self._leaves:
            leaf = inputs[position].requires_grad_()
            leaves.append((i, leaf))
            if written:
                inputs[position] = leaf.clone()
        outputs = self._forward(*inputs)
        roots = [outputs[i] for i in self._roots]
        if self._num_sent is not None:
            roots += outputs[self._num_sent :]
        self._kept[microbatch] = (leaves, roots)
        return outputs  # type: ignore[no-any-return]

    def backward(
        self,
        microbatch: int,
        gradients: Sequence[Tensor | None],
        later: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        leaves, outputs = self._kept.pop(microbatch)
        roots, seeds = [], []
        for root, seed in zip(outputs, gradients, strict=True):
            if seed is not None and root.requires_grad:
                roots.append(root)
                seeds.append(seed)
        for i, leaf in leaves:
            if (seed := later[i]) is not None:
                roots.append(leaf)
                seeds.append(seed)
        for i, parameter, _ in self._tied:
            if (seed := later[i]) is not None:
                roots.append(parameter)
                seeds.append(seed)
        if roots:
            compat.run_backward(tuple(roots), tuple(seeds))
        found: list[Tensor | None] = [None] * (self._num_receives + len(self._tied))
        for i, leaf in leaves:
            found[i] = leaf.grad
        for i, parameter, is_passed_on in self._tied:
            if is_passed_on:
                found[i], parameter.grad = parameter.grad, None
        return found

    def weight(self, microbatch: int) -> None:
        """Does nothing: ``backward`` has computed the gradients of the weights."""

    def drop(self) -> None:
        self._kept.clear()

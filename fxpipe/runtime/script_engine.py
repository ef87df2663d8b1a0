"""The engine of emitted scripts: runs stage functions that hold their transfers as operators."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe import ops, tree
from fxpipe.runtime.engine import AutogradEngine
from fxpipe.runtime.stage import Stage


class ScriptEngine(AutogradEngine):
    """Lets the schedule own the transfers that stand in a stage function.

    ``recv`` hands out what the stage's receive action brought; what ``send`` is given becomes an
    output, which the send action takes. Neither operator communicates, and since both pass tensors
    on as they are, autograd sees the graph that the stage without operators would have made.

    Args:
        stage: its module holds parameters, buffers and leaf modules, and has no forward.
        function: ``function(module, mb, *inputs, *sizes)``, as torch.fx prints it.
        loss: ``loss(*outputs, *target)`` -> a tuple of the loss, on the tensors among the leaves;
            None if the stage has none.
        has_backward: keep what backward needs.
        tied: the parameter of each of the stage's tied links.
    """

    def __init__(
        self,
        stage: Stage,
        function: Callable[..., Any],
        loss: Callable[..., Any] | None,
        *,
        has_backward: bool,
        tied: Sequence[nn.Parameter],
    ) -> None:
        self._compute = _Compute(stage, function, loss)
        stage = dataclasses.replace(stage, module=self._compute)
        super().__init__(stage, has_backward=has_backward, tied=tied)

    def forward(self, microbatch: int, inputs: list[Any]) -> Sequence[Any]:
        self._compute.microbatch = microbatch
        return super().forward(microbatch, inputs)


class _Compute(nn.Module):
    """A stage function as the engine calls it: received tensors go in, sent ones come out."""

    def __init__(
        self, stage: Stage, function: Callable[..., Any], loss: Callable[..., Any] | None
    ) -> None:
        super().__init__()
        self.module, self.microbatch = stage.module, 0
        self._function, self._loss = function, loss
        self._first_receive = len(stage.batch_inputs) + len(stage.sizes)
        self._first_target = self._first_receive + len(stage.receives)
        self._receives = [r.edge for r in stage.receives]
        # one output may leave over several edges
        self._sends = {s.output: s.edge for s in stage.sends}

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        received = inputs[self._first_receive : self._first_target]
        wires = _Wires(dict(zip(self._receives, received, strict=True)))
        with ops.port(wires):
            results = self._function(self.module, self.microbatch, *inputs[: self._first_receive])
        sent = [wires.sent[self._sends[output]] for output in range(len(self._sends))]
        if self._loss is None:
            return (*sent, *results)
        leaves = [*results, *tree.flatten(inputs[self._first_target])[0]]
        (loss,) = self._loss(*(x for x in leaves if isinstance(x, Tensor)))
        return (*sent, *results, loss)


class _Wires:
    """The port of one run of a stage function.

    Args:
        received: what has arrived, by edge.
    """

    def __init__(self, received: Mapping[int, Tensor]) -> None:
        self._received = received
        self.sent: dict[int, Tensor] = {}

    def recv(
        self, mb: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device, edge: int
    ) -> Tensor:
        return self._received[edge]

    def send(self, value: Tensor, mb: int, edge: int) -> None:
        self.sent[edge] = value

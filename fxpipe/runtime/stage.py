"""What a rank is given for each stage it runs: a module and the wires that lead in and out.

Plain data, made by the compiler and read by the engines and the executor. The compiler is not
needed to run it.

**Terms.** A *receive* brings a tensor from another stage, in the order of the stage's
placeholders. A *send* names one of the stage's outputs and one stage that reads it. A gradient
travels over the same edges in the other direction, but not always between the same stages: see
``Receive.gradient_to``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Receive:
    """A tensor that comes from another stage.

    Args:
        edge: index of the edge, the same on every rank.
        name: name of the value in the traced model.
        source: stage that sends it.
        gradient_to: stage that gets the gradient: the producer, or the reader before this one,
            which adds its own contributions. None if no gradient flows.
        gradient_from: edge, and stage, of the reader after this one, whose gradient starts the sum
            of this stage. None if this is the last reader.
        written: the stage writes the tensor in place, so the engine hands it a copy.
    """

    edge: int
    name: str
    source: int
    gradient_to: int | None = None
    gradient_from: tuple[int, int] | None = None
    written: bool = False


@dataclasses.dataclass(frozen=True)
class Send:
    """One output of the stage that one other stage reads.

    Args:
        edge: index of the edge.
        target: stage that reads it.
        output: index among the outputs of the stage's module.
    """

    edge: int
    target: int
    output: int


@dataclasses.dataclass(frozen=True)
class OutputGradient:
    """The gradient of one output of the stage, sent by the first stage that reads it.

    Args:
        edge: index of the edge.
        source: stage that sends the gradient.
        output: index among the outputs of the stage's module.
    """

    edge: int
    source: int
    output: int


@dataclasses.dataclass(frozen=True)
class TiedLink:
    """The gradient of a parameter that other stages hold too, passed on with every microbatch.

    Args:
        name: canonical name of the parameter.
        edge: index of the edge to `gradient_to`; -1 on the first stage that holds the parameter.
        gradient_to: the stage before this one that holds it; None on the first, which sums.
        gradient_from: edge, and stage, of the next stage that holds it, whose gradient starts the
            sum of this one. None on the last.
    """

    name: str
    edge: int
    gradient_to: int | None
    gradient_from: tuple[int, int] | None


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage, ready to run.

    The module's placeholders are, in this order: batch inputs, sizes, received tensors, and on the
    last stage the target. Its outputs are the values it sends, and on the last stage the leaves of
    the model's output, followed by the loss if there is one.

    Args:
        index: s, 0 <= s < S.
        module: pure compute; original names.
        batch_inputs: which inputs of the model it reads, as indices.
        sizes: which sizes it reads, as indices into ``Layout.sizes``.
        receives: tensors from other stages, edges ascending.
        sends: transfers to other stages, edges ascending.
        gradients: gradients of the outputs, edges ascending.
        tied: gradients of parameters that other stages hold too.
        num_sent: how many outputs are values for other stages; the rest belongs to the model.
        has_loss: the last output is the loss of the microbatch.
        takes_output_gradients: the loss is computed outside, and backward starts from gradients of
            the leaves of the model's output.
        origins: module and source line of each node of the module, for error messages.
    """

    index: int
    module: nn.Module
    batch_inputs: tuple[int, ...]
    sizes: tuple[int, ...]
    receives: tuple[Receive, ...]
    sends: tuple[Send, ...]
    gradients: tuple[OutputGradient, ...] = ()
    tied: tuple[TiedLink, ...] = ()
    num_sent: int = 0
    has_loss: bool = False
    takes_output_gradients: bool = False
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class TensorLayout:
    """Shape, dtype and memory order of a tensor that crosses.

    Args:
        shape: sizes of the dimensions as the stage sees them.
        dtype: element type.
        order: dimensions from the slowest to the fastest in memory; None if that is their order.
            A channels-last image stays channels-last, so that the same kernels run and give the
            same bits.
        strides: of a tensor with gaps or repeats in memory, which it travels without; else None.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None

    def empty(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """A buffer for a transfer, contiguous, and the same memory as the stage sees it."""
        if self.order is None:
            buffer = torch.empty(self.shape, dtype=self.dtype, device=device)
            return buffer, buffer
        memory = torch.empty([self.shape[d] for d in self.order], dtype=self.dtype, device=device)
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return memory, memory.permute(inverse)

    def with_gaps(self, received: Tensor) -> Tensor:
        """What arrived, in memory as the sender has it: the same kernels run."""
        if self.strides is None:
            return received
        for dim in (d for d, stride in enumerate(self.strides) if stride == 0):
            received = received.narrow(dim, 0, 1)
        memory = torch.empty_strided(
            received.shape, self.strides, dtype=self.dtype, device=received.device
        )
        return memory.copy_(received).expand(self.shape)

    def for_transfer(self, value: Tensor) -> Tensor:
        """`value` as the contiguous tensor that `empty` makes the buffer for."""
        value = value.detach()
        if self.order is not None:
            value = value.permute(self.order)
        return value if value.is_contiguous() else value.contiguous()

    def zeros(self, device: torch.device) -> Tensor:
        """A contiguous tensor of zeros, in memory order, for a gradient that does not exist."""
        return self.empty(device)[0].zero_()


@dataclasses.dataclass(frozen=True)
class Layout:
    """Everything about the shapes of one microbatch that a rank must know before it runs.

    Args:
        edges: layout of each edge.
        sizes: values without a tensor that a stage reads and another computes, by index.
    """

    edges: tuple[TensorLayout, ...]
    sizes: tuple[object, ...]

    @functools.cached_property
    def has_gaps(self) -> bool:
        """Whether what crosses over any edge has gaps or repeats in memory."""
        return any(edge.strides is not None for edge in self.edges)


def layout_of(value: Tensor) -> TensorLayout:
    """The layout of a tensor, or of a fake one.

    A tensor keeps its memory order, its gaps, and its repeats, which an expanded one has. One whose
    elements overlap in another way becomes contiguous.
    """
    shape = tuple(int(n) for n in value.shape)
    strides = tuple(int(n) for n in value.stride())
    if 0 in shape:
        return TensorLayout(shape, value.dtype)
    order = sorted(range(len(shape)), key=lambda d: (-strides[d], d))
    expected, is_dense = 1, True
    for d in reversed(order):
        if shape[d] != 1 and strides[d] != 0:
            if strides[d] < expected:
                return TensorLayout(shape, value.dtype)
            is_dense = is_dense and strides[d] == expected
            expected = strides[d] * shape[d]
    repeats = any(n != 1 and stride == 0 for n, stride in zip(shape, strides, strict=True))
    if repeats or not is_dense:
        return TensorLayout(shape, value.dtype, strides=strides)
    in_order = order == list(range(len(shape)))
    return TensorLayout(shape, value.dtype, None if in_order else tuple(order))

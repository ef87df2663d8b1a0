"""Cuts a batch into microbatches and puts their results together again."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpipe import tree
from fxpipe.errors import InputError


@dataclasses.dataclass(frozen=True)
class BatchDims:
    """Along which dimension each input of the model is cut.

    Args:
        names: placeholder of each input, for messages.
        dims: its dimension; None: every microbatch gets it whole.
        written: whether the model writes it in place. Microbatches are views of the batch, which
            autograd does not let be written one by one: each gets a copy.
    """

    names: tuple[str, ...]
    dims: tuple[int | None, ...]
    written: tuple[bool, ...] = ()

    def rows(self, batch: Sequence[Tensor]) -> int:
        """Rows of the batch.

        Raises:
            InputError: two inputs have another number of rows, or none has a row.
        """
        found = {
            name: tensor.shape[dim]
            for name, tensor, dim in zip(self.names, batch, self._dims(batch), strict=True)
            if dim is not None
        }
        if len(set(found.values())) > 1:
            shown = ", ".join(f"{name} has {rows}" for name, rows in found.items())
            name = list(found)[-1]
            raise InputError(
                "the inputs do not have the same number of rows",
                at=shown,
                hint=f"name what has no batch dimension: batch_dims={{{name!r}: None}}",
            )
        if not found or 0 in found.values():
            raise InputError("the batch has no rows to cut into microbatches")
        return next(iter(found.values()))

    def split(self, batch: Sequence[Tensor], count: int) -> list[list[Tensor]]:
        """The batch as `count` microbatches; their rows differ by at most one."""
        pieces = [
            [tensor] * count if dim is None else list(tensor.tensor_split(count, dim=dim))
            for tensor, dim in zip(batch, self._dims(batch), strict=True)
        ]
        for i in itertools.compress(range(len(pieces)), self.written):
            pieces[i] = [piece.clone() for piece in pieces[i]]
        return [list(piece) for piece in zip(*pieces, strict=True)] if pieces else [[]] * count

    def _dims(self, batch: Sequence[Tensor]) -> list[int | None]:
        dims: list[int | None] = []
        for name, tensor, dim in zip(self.names, batch, self.dims, strict=True):
            if dim is not None and tensor.dim() > 0 and not -tensor.dim() <= dim < tensor.dim():
                raise InputError(
                    f"input {name} has {tensor.dim()} dimensions and no dimension {dim}",
                    at=f"{name}: {list(tensor.shape)}",
                    hint=f"change batch_dims[{name!r}]",
                )
            dims.append(None if tensor.dim() == 0 else dim)
        return dims


def split_target(target: Any, rows: int, count: int) -> list[Any]:
    """The target of each microbatch: every tensor in it is cut along dimension 0.

    Raises:
        InputError: a tensor has another number of rows than the batch.
    """
    leaves, spec = tree.flatten(target)
    pieces: list[Sequence[Any]] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            pieces.append([leaf] * count)
            continue
        if leaf.shape[0] != rows:
            raise InputError(
                f"the target has {leaf.shape[0]} rows, the batch {rows}",
                at=f"target: {list(leaf.shape)}",
            )
        pieces.append(leaf.tensor_split(count))
    return [spec.unflatten([piece[m] for piece in pieces]) for m in range(count)]


def piece_rows(rows: int, count: int) -> list[int]:
    """Rows of each microbatch, as ``tensor_split`` deals them out.

    >>> piece_rows(10, 4)
    [3, 3, 2, 2]
    """
    return [rows // count + (m < rows % count) for m in range(count)]


def loss_weights(rows: Sequence[int], reduction: str) -> list[float]:
    """What the loss of each microbatch counts in the loss of the batch."""
    if reduction == "sum":
        return [1.0] * len(rows)
    total = sum(rows)
    return [r / total for r in rows]


def combine(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Weighted sum of 0-dim values, microbatch 0 first."""
    total = values[0] * weights[0]
    for value, weight in zip(values[1:], weights[1:], strict=True):
        total = total + value * weight
    return total


def merge_leaves(
    outputs: Sequence[Sequence[Any]],
    weights: Sequence[float],
    dims: Sequence[int | None] = (),
) -> list[Any]:
    """The leaves of the output of the batch, from those of the microbatches, [M][leaves].

    0-dim tensors are combined as the loss is; other tensors are joined along the dimension of their
    rows; what has no rows, and what is no tensor, is as the first microbatch gave it.

    Args:
        outputs: [M][leaves].
        weights: what each microbatch counts, [M].
        dims: the dimension of the rows of each leaf, None where it has none; empty: 0 for all.
    """
    merged = []
    for leaves, dim in zip(zip(*outputs, strict=True), _all_dims(outputs, dims), strict=True):
        if not isinstance(leaves[0], Tensor):
            merged.append(leaves[0])
        elif leaves[0].dim() == 0:
            merged.append(combine(leaves, weights))
        else:
            merged.append(leaves[0] if dim is None else torch.cat(leaves, dim))
    return merged


def split_gradients(
    gradients: Sequence[Tensor | None],
    outputs: Sequence[Sequence[Any]],
    weights: Sequence[float],
    dims: Sequence[int | None] = (),
) -> list[list[Tensor | None]]:
    """The gradient of each microbatch's leaves, [M][leaves], from those of `merge_leaves`."""
    pieces: list[Sequence[Tensor | None]] = []
    of_leaves = zip(*outputs, strict=True)
    for gradient, leaves, dim in zip(gradients, of_leaves, _all_dims(outputs, dims), strict=True):
        if gradient is None:
            pieces.append([None] * len(outputs))
        elif leaves[0].dim() == 0:
            pieces.append([gradient * weight for weight in weights])
        elif dim is None:
            pieces.append([gradient, *[None] * (len(outputs) - 1)])
        else:
            pieces.append(torch.split(gradient, [leaf.shape[dim] for leaf in leaves], dim))
    return [list(piece) for piece in zip(*pieces, strict=True)]


def _all_dims(outputs: Sequence[Sequence[Any]], dims: Sequence[int | None]) -> Sequence[int | None]:
    return dims or (0,) * len(outputs[0])


def batch_dims_of(
    names: Sequence[str], parameters: Sequence[str], chosen: Mapping[str, int | None]
) -> BatchDims:
    """The dimension of each input from what the user said about parameters of ``forward``.

    Args:
        names: placeholder of each input.
        parameters: the parameter of ``forward`` each input belongs to.
        chosen: parameter -> dimension.
    """
    return BatchDims(tuple(names), tuple(chosen.get(p, 0) for p in parameters))

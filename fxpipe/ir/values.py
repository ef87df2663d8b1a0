"""What the values of a graph's nodes hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors of a value, also those inside containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list, set)):
        for item in value:
            yield from tensors_in(item)


def has_tensor(value: object) -> bool:
    """Whether a tensor is anywhere in the value."""
    return next(tensors_in(value), None) is not None

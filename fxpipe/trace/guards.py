"""What Python code saw of the sizes of the example while a model was traced.

A graph holds one way through the model's branches and loops. It is right for a batch for whose
sizes every guard holds: the same numbers were looked at, so the same way is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Guard:
    """Python was given the value of a node: to branch, to count a loop, to index a list.

    Args:
        node: name of the node in the traced graph. Its value is a number, a size, or a tensor that
            is made of sizes and constants alone.
        value: as `plain_value` gives it.
        line: the user's line that looked, as ``model.py:12 in forward``.
    """

    node: str
    value: Any
    line: str

    def holds(self, value: Any) -> bool:
        """Whether Python would see the same again; ``1``, ``1.0`` and ``True`` are not the same."""
        return _exactly(plain_value(value), self.value)


def plain_value(value: Any) -> Any:
    """A number, a size or a tensor as Python holds it, without what fx or torch wrap it in."""
    if isinstance(value, Tensor):
        return value.tolist()
    return tuple(value) if isinstance(value, torch.Size) else value


def _exactly(one: Any, other: Any) -> bool:
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_exactly, one, other))
    both_nan = one != one and other != other
    return type(one) is type(other) and (bool(one == other) or both_nan)

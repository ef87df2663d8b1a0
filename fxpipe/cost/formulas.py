"""FLOP formulas for operators that ``torch.utils.flop_counter`` counts as nothing.

Arguments are shapes where the operator takes tensors. Checked on torch 2.14.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import sdpa_flop_count

Shape = Sequence[int]


def attention_flops(query: Shape, key: Shape, value: Shape, *_: object, **__: object) -> int:
    """Two products of matrices; a causal mask is not taken off, as torch does elsewhere."""
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def grouped_mm_flops(a: Shape, b: Shape, *_: object, **__: object) -> int:
    """Products of matrices of which one dimension is cut into groups.

    Args:
        a: [M, K] or [G, M, K].
        b: [K, N] or [G, K, N]. Where only one of both has the dimension G, each row or column
            belongs to one group, so G does not multiply the work.
    """
    groups = a[0] if len(a) == len(b) == 3 else 1
    return 2 * groups * a[-2] * a[-1] * b[-1]


def recurrent_flops(inputs: Shape, *weights: object, **_: object) -> int:
    """One layer of a recurrent network: each step multiplies by both matrices of weights.

    Args:
        inputs: [steps, rows, features], in any order of the first two.
        weights: of the inputs and of the state; then biases and states, which do not count.
    """
    return 2 * math.prod(inputs[:-1]) * sum(_size(w) for w in weights[:2])


def stacked_recurrent_flops(
    inputs: Shape, weights: Sequence[Shape], *_: object, **__: object
) -> int:
    """As `recurrent_flops`, with the weights and biases of all layers in one list."""
    return 2 * math.prod(inputs[:-1]) * sum(_size(w) for w in weights if len(w) == 2)


def _size(shape: object) -> int:
    assert isinstance(shape, Sequence)
    return math.prod(shape)


_BY_OPERATOR: dict[str, Callable[..., int]] = {
    "_scaled_dot_product_flash_attention_for_cpu": attention_flops,
    "_scaled_dot_product_fused_attention_overrideable": attention_flops,
    "_grouped_mm": grouped_mm_flops,
    "mkldnn_rnn_layer": recurrent_flops,
    "_cudnn_rnn": stacked_recurrent_flops,
}

BY_FUNCTION: dict[str, Callable[..., int]] = {
    "grouped_mm": grouped_mm_flops,
    "_grouped_mm": grouped_mm_flops,
}
"""Functions whose fake kernel refuses what the real one takes (float32 on CPU): not run at all."""


def missing_formulas() -> dict[Any, Callable[..., int]]:
    """What ``FlopCounterMode(custom_mapping=...)`` needs, for the operators this torch has."""
    aten = torch.ops.aten
    return {getattr(aten, name): f for name, f in _BY_OPERATOR.items() if hasattr(aten, name)}

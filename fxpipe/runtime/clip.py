"""Gradient clipping by the norm over all stages."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fxpipe.runtime.driver import Driver


def clip_grad_norm(
    parameters: Sequence[nn.Parameter],
    owned: Sequence[nn.Parameter],
    driver: Driver,
    *,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    """Scales gradients so that their norm over all ranks is at most `max_norm`.

    Args:
        parameters: whose gradients are scaled: all of this process.
        owned: those that count here; one that several stages hold counts at the first of them.
        driver: joins the ranks.
        max_norm: largest norm.
        norm_type: p of the p-norm; may be ``inf``.
        error_if_nonfinite: raise if the norm is NaN or infinite.

    Returns:
        The norm before clipping, 0-dim.

    Raises:
        RuntimeError: the norm is not finite and `error_if_nonfinite`; on every rank.
    """
    gradients = [p.grad for p in owned if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, norm_type)
    if not driver.is_whole:
        with driver.together():
            norm = _over_ranks(norm, norm_type, driver)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(f"the norm of order {norm_type} over all stages is not finite: {norm}")
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _over_ranks(norm: Tensor, norm_type: float, driver: Driver) -> Tensor:
    (rank,) = driver.ranks
    # float64: a rank without gradients does not know the dtype of the others
    part = norm.detach().to("cpu", torch.float64)
    if math.isinf(norm_type):
        total = driver.collectives.reduce({rank: part}, "max")
    else:
        total = driver.collectives.reduce({rank: part**norm_type}, "sum") ** (1.0 / norm_type)
    return total.to(norm.device)

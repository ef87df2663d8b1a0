"""Parts of a stage that run in a way of their own."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


class CheckpointRegion(nn.Module):
    """Keeps nothing of what it computes for backward but its inputs, and computes it again there.

    Random numbers are drawn again from the same state.

    Args:
        body: what it computes; without parameters of its own.
    """

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, *inputs: Any) -> Any:
        # the reentrant kind loses gradients where no input needs one
        return checkpoint(self.body, *inputs, use_reentrant=False)

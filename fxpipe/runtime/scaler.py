"""torch's gradient scaler, agreed over all stages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxpipe import compat
from fxpipe.runtime.driver import Driver


class GradScaler(torch.amp.GradScaler):
    """Skips a step on every rank if one rank has a gradient that is not finite.

    torch's own looks at the gradients of its rank alone: after an infinity on one stage the others
    step, and their scales part. Made by ``Pipeline.grad_scaler``; used as torch's is. Every rank
    calls `unscale_` or `step`, also one whose stage has no gradients.

    Args:
        driver: joins the ranks.
        kwargs: as of ``torch.amp.GradScaler``.
    """

    def __init__(self, driver: Driver, **kwargs: Any) -> None:
        super().__init__(driver.device.type, **kwargs)
        self._driver = driver
        self.scale(torch.zeros((), device=driver.device))  # makes the scale, before any unscale_

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients by the scale; finds out whether those of all ranks are finite."""
        super().unscale_(optimizer)
        if self.is_enabled() and not self._driver.is_whole:
            self._agree(compat.found_infinities(self, optimizer))

    def _agree(self, found: dict[torch.device, Tensor]) -> None:
        (rank,) = self._driver.ranks
        here = max([float(value) for value in found.values()], default=0.0)
        with self._driver.together():
            part = {rank: torch.tensor(here, dtype=torch.float64)}
            anywhere = float(self._driver.collectives.reduce(part, "max"))
        # a stage without gradients takes part: torch would refuse to step without a finding
        found.setdefault(self._driver.device, torch.zeros((), device=self._driver.device))
        for value in found.values():
            value.fill_(anywhere)

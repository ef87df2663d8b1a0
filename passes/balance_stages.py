"""Finds cuts that give every stage about the same work."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import fx

from fxpipe.balance.chain import cut_chain
from fxpipe.errors import PassError
from fxpipe.ir import verify
from fxpipe.ir.annotations import cost_of, value_of
from fxpipe.ir.cuts import cut_reasons, placed_nodes
from fxpipe.ir.placement import place
from fxpipe.ir.values import tensors_in
from fxpipe.manager import Pass

LINK_BYTES_PER_S = 10e9
"""Nominal bandwidth between two ranks: PCIe 4.0 x8, or one 100 Gb/s network card."""


@dataclasses.dataclass(frozen=True)
class BalanceStages(Pass):
    """Stamps each node with its stage; the most expensive stage is as cheap as it can be.

    Exact for contiguous stages in graph order: a dynamic program over all places where a cut
    may stand (see ``fxpipe.balance.chain``). A cut costs the transfer of what crosses it.

    Args:
        stages: S >= 1.
        by: what is balanced: ``"time"``, forward and backward as estimated from FLOPs and bytes,
            or ``"parameters"``, bytes of parameters.

    Raises:
        PassError: the graph cannot be cut into so many stages.
    """

    name: ClassVar[str] = "balance-stages"
    requires: ClassVar = (verify.values_known,)
    ensures: ClassVar = (
        verify.stages_assigned,
        verify.edges_point_forward,
        verify.edges_carry_tensors,
    )

    stages: int
    by: str = "time"

    def run(self, gm: fx.GraphModule) -> fx.GraphModule:
        placed = placed_nodes(gm)
        reasons = cut_reasons(gm)
        places = sum(r is None for r in reasons[1:])
        if self.stages - 1 > places:
            raise PassError(
                f"{self.stages} stages need {self.stages - 1} cuts, "
                f"but the model has {places} places to cut",
                at=f"stages={self.stages}",
                hint=f"use stages <= {places + 1}",
            )
        crossing = _crossing_bytes(placed)
        link = LINK_BYTES_PER_S if self.by == "time" else float("inf")
        cut_costs = [
            None if reason is not None else count / link
            for count, reason in zip(crossing, reasons, strict=True)
        ]
        place(gm, cut_chain(self._costs(placed), self.stages, cut_costs=cut_costs))
        return gm

    def _costs(self, placed: list[fx.Node]) -> list[float]:
        costs = [cost_of(n) for n in placed]
        if self.by == "parameters":
            return [float(c.parameter_bytes) for c in costs]
        return [c.forward_s + c.backward_s for c in costs]


def _crossing_bytes(placed: list[fx.Node]) -> list[int]:
    """Bytes of one microbatch that cross a cut before each placed node."""
    at = {n: i for i, n in enumerate(placed)}
    change = [0] * (len(placed) + 1)
    for node, i in at.items():
        last = max((at.get(u, len(placed) - 1) for u in node.users), default=i)
        size = sum(t.numel() * t.element_size() for t in tensors_in(value_of(node)))
        change[i + 1] += size
        change[last + 1] -= size
    crossing, total = [], 0
    for c in change[: len(placed)]:
        total += c
        crossing.append(total)
    return crossing

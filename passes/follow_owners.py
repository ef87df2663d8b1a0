"""Gives each node its stage from where the parameters already are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from torch import fx

from fxpipe.errors import PassError
from fxpipe.ir import verify
from fxpipe.ir.annotations import canonical_name, source_of
from fxpipe.ir.cuts import cut_reasons, placed_nodes
from fxpipe.ir.edges import state_names
from fxpipe.ir.placement import place
from fxpipe.manager import Pass


@dataclasses.dataclass(frozen=True)
class FollowOwners(Pass):
    """Cuts a second graph of a model, traced in another mode, so that every stage keeps its state.

    Between the last node that must be on a stage and the first that must be on the next, the cut
    stands at the node where the first graph was cut, or as late as it can.

    Args:
        stages: S.
        owners: stages that hold each parameter and buffer, by canonical name.
        cuts: names of the nodes at which the stages of the first graph start.

    Raises:
        PassError: the graph reads the state of the stages in another order.
    """

    name: ClassVar[str] = "follow-owners"
    requires: ClassVar = (verify.values_known,)
    ensures: ClassVar = (
        verify.stages_assigned,
        verify.edges_point_forward,
        verify.edges_carry_tensors,
    )

    stages: int
    owners: Mapping[str, tuple[int, ...]]
    cuts: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}{{stages={self.stages},cuts={self.cuts}}}"

    def run(self, gm: fx.GraphModule) -> fx.GraphModule:
        placed = placed_nodes(gm)
        reasons = cut_reasons(gm)
        stage_of = [self._owner(gm, node) for node in placed]
        starts: list[int] = []
        for stage in range(1, self.stages):
            before = [i for i, s in enumerate(stage_of) if s is not None and max(s) < stage]
            after = [i for i, s in enumerate(stage_of) if s is not None and min(s) >= stage]
            first = max([0, *before, *starts]) + 1
            last = min([*after, len(placed) - 1 - (self.stages - 1 - stage)])
            places = [i for i in range(first, last + 1) if reasons[i] is None]
            if not places:
                node = placed[min(first, len(placed) - 1)]
                raise PassError(
                    f"stage {stage} cannot keep its parameters in this mode: "
                    "the model uses its modules in another order",
                    at=f"%{node}, {source_of(node)}",
                    hint="compile two pipelines, or name cuts at which both modes agree",
                )
            same = [i for i in places if placed[i].name == self.cuts[stage - 1]]
            starts.append((same or places)[-1])
        place(gm, starts)
        return gm

    def _owner(self, gm: fx.GraphModule, node: fx.Node) -> tuple[int, ...] | None:
        """The stages on which a node may run because they hold what it reads; None if any may."""
        read = [node, *(n for n in node.all_input_nodes if n.op == "get_attr")]
        names = [canonical_name(gm, name) for n in read for name in state_names(gm, n)]
        held = [self.owners[name] for name in names if name in self.owners]
        if not held:
            return None
        return tuple(sorted(set(held[0]).intersection(*held[1:]))) or held[0]

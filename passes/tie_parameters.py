"""Finds the parameters that several stages hold."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import ClassVar

from torch import fx, nn

from fxpipe.ir import verify
from fxpipe.ir.annotations import canonical_name, require_stage, set_tied_parameters
from fxpipe.ir.edges import attribute, state_names
from fxpipe.manager import Pass


@dataclasses.dataclass(frozen=True)
class TieParameters(Pass):
    """Notes, by identity, each parameter that more than one stage reads, and by which.

    Their gradients are summed over the stages after the last backward of a step. The first of
    the stages owns the parameter: it counts in norms and is saved there.
    """

    name: ClassVar[str] = "tie-parameters"
    requires: ClassVar = (verify.stages_assigned,)

    def run(self, gm: fx.GraphModule) -> fx.GraphModule:
        stages: dict[str, set[int]] = defaultdict(set)
        for node in gm.graph.nodes:
            for name in state_names(gm, node):
                if isinstance(attribute(gm, name), nn.Parameter):
                    stages[canonical_name(gm, name)].add(require_stage(node))
        tied = {name: tuple(sorted(held)) for name, held in stages.items() if len(held) > 1}
        set_tied_parameters(gm, tied)
        return gm

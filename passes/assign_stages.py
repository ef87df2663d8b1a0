"""Gives each node its stage from cuts that the user named."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import fx

from fxpipe.errors import PassError
from fxpipe.ir import verify
from fxpipe.ir.annotations import module_path_of, source_of
from fxpipe.ir.cuts import cut_reasons, placed_nodes
from fxpipe.ir.placement import place
from fxpipe.manager import Pass


@dataclasses.dataclass(frozen=True)
class AssignStages(Pass):
    """Stamps each node with its stage; a new stage starts at each cut.

    Args:
        cuts: names of modules or nodes. The first node of a module, or the node itself, is the
            first of its stage.

    Raises:
        PassError: a cut names nothing, comes too early or too late, or cannot stand there.
    """

    name: ClassVar[str] = "assign-stages"
    requires: ClassVar = (verify.values_known,)
    ensures: ClassVar = (
        verify.stages_assigned,
        verify.edges_point_forward,
        verify.edges_carry_tensors,
    )

    cuts: tuple[str, ...]

    def run(self, gm: fx.GraphModule) -> fx.GraphModule:
        placed = placed_nodes(gm)
        reasons = cut_reasons(gm)
        starts: list[int] = []
        for cut in self.cuts:
            index = _find(placed, cut)
            node = placed[index]
            if index == 0 or index in starts:
                other = f"cut {self.cuts[starts.index(index)]!r}" if index else "the model"
                raise PassError(
                    f"cut {cut!r} leaves a stage without nodes: {other} starts there too",
                    at=f"%{node}, {source_of(node)}",
                )
            if reason := reasons[index]:
                allowed = next(i for i in range(index, -1, -1) if reasons[i] is None)
                raise PassError(
                    f"no stage can start at cut {cut!r}: {reason}",
                    at=f"%{node}, {source_of(node)}",
                    hint=f"the place before it is %{placed[allowed]}",
                )
            starts.append(index)
        place(gm, sorted(starts))
        return gm


def _find(placed: list[fx.Node], cut: str) -> int:
    """Index of the first node of the module, or of the node, with this name."""
    for i, node in enumerate(placed):
        modules = [path for path, _ in module_path_of(node)]
        if node.op == "call_module":
            modules.append(str(node.target))
        if any(m == cut or m.startswith(cut + ".") for m in modules):
            return i
    for i, node in enumerate(placed):
        if node.name == cut:
            return i
    paths = dict.fromkeys(m for n in placed for m, _ in module_path_of(n) if m)
    calls = dict.fromkeys(str(n.target) for n in placed if n.op == "call_module")
    known = list(paths) or list(calls)
    shown = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
    raise PassError(
        f"cut {cut!r} names no module and no node",
        hint=f"modules are: {shown}; nodes are: {placed[0]}, ..., {placed[-1]}",
    )

"""Graphs as the compiler hands them to the passes, and what tests ask of them."""

import copy
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe import ops, tree
from fxpipe.cost.flops import annotate_costs
from fxpipe.ir.annotations import set_canonical_names
from fxpipe.ir.cuts import cut_reasons, placed_nodes
from fxpipe.manager import Pass, Step, run_passes
from fxpipe.passes import AssignStages, Normalize, RemoveDeadNodes, default_passes
from fxpipe.runtime.state import ModelState
from fxpipe.trace import trace


def traced(model: nn.Module, *args: Any) -> fx.GraphModule:
    """The graph of ``model(*args)``, annotated as before the first pass."""
    gm = trace(model, args, {}).module
    set_canonical_names(gm, ModelState(model).canonical)
    annotate_costs(gm)
    return gm


def places_to_cut(model: nn.Module, *args: Any, training: bool = True) -> list[str]:
    """Names of the nodes at which a stage may start."""
    passes = [Normalize(training=training), RemoveDeadNodes()]
    gm, _ = run_passes(traced(model, *args), passes)
    found = zip(placed_nodes(gm), cut_reasons(gm), strict=True)
    return [node.name for node, reason in list(found)[1:] if reason is None]


def passes_up_to(kind: type[Pass], cuts: tuple[str, ...]) -> list[Pass]:
    """The default passes for these cuts, the first of this kind being the last."""
    passes = default_passes(AssignStages(cuts), training=True)
    last = next(i for i, p in enumerate(passes) if isinstance(p, kind))
    return list(passes[: last + 1])


def lowered(model: nn.Module, *args: Any, cuts: tuple[str, ...]) -> fx.GraphModule:
    """The graph after all passes."""
    gm, _ = run_passes(traced(model, *args), default_passes(AssignStages(cuts), training=True))
    return gm


def rewrite(step: Step) -> str:
    """What a pass did, as text."""
    return f"{step.before}\n=> {step.spec}\n\n{step.after}"


def same_bits(model: nn.Module, gm: fx.GraphModule, *args: Any) -> bool:
    """Whether the graph gives what the model gives; both run on copies."""
    model, gm = copy.deepcopy(model), copy.deepcopy(gm)
    torch.manual_seed(0)
    want = tree.flatten(model(*copy.deepcopy(args)))[0]
    first = next(iter(gm.graph.nodes))
    index = (0,) if first.target == "mb" else ()
    torch.manual_seed(0)
    with ops.port(ops.Mailbox()):
        got = gm(*index, *copy.deepcopy(args))
    return all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b
        for a, b in zip(got, want, strict=True)
    )

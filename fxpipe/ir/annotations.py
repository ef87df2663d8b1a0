"""Typed access to what fxpipe writes into ``Node.meta`` and ``GraphModule.meta``.

The only place that knows the keys. ``val`` is torch's own key for the fake value of a node.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import fx
from torch.fx import Node

from fxpipe.errors import VerifyError

if TYPE_CHECKING:
    from fxpipe.ir.routes import Route

_STAGE = "fxpipe.stage"
_STAGES = "fxpipe.stages"
_SOURCE = "fxpipe.source"
_MODULE_PATH = "fxpipe.module_path"
_MUTATES = "fxpipe.mutates"
_RESULT_IS = "fxpipe.result_is"
_UPDATES_BUFFERS = "fxpipe.updates_buffers"
_RANDOM = "fxpipe.random"
_CHECKPOINT = "fxpipe.checkpoint"
_COST = "fxpipe.cost"
_ROUTES = "fxpipe.routes"
_TIED = "fxpipe.tied"
_TIED_ROUTES = "fxpipe.tied_routes"
_CANONICAL = "fxpipe.canonical"


def value_of(node: Node) -> Any:
    """The fake value the node stands for: a FakeTensor, a Python value, or a container of these."""
    return node.meta.get("val")


def set_value(node: Node, value: object) -> None:
    node.meta["val"] = value


def source_of(node: Node) -> str:
    """The user's own source line, as ``model.py:12 in forward``; empty if unknown."""
    return str(node.meta.get(_SOURCE, ""))


def set_source(node: Node, source: str) -> None:
    node.meta[_SOURCE] = source


def module_path_of(node: Node) -> tuple[tuple[str, str], ...]:
    """Modules the node was called in, outermost first, as (FQN, class name)."""
    return tuple(node.meta.get(_MODULE_PATH, ()))


def set_module_path(node: Node, path: tuple[tuple[str, str], ...]) -> None:
    node.meta[_MODULE_PATH] = path


def origin_of(node: Node) -> str:
    """Where in the user's model a node comes from: ``blocks.7.attn (Attention), model.py:12``."""
    path = module_path_of(node)
    module = f"{path[-1][0] or 'the model'} ({path[-1][1]})" if path else ""
    return ", ".join(part for part in (module, source_of(node)) if part)


def mutates_of(node: Node) -> tuple[str, ...]:
    """Names of the argument nodes whose tensors the node writes in place."""
    return tuple(node.meta.get(_MUTATES, ()))


def set_mutates(node: Node, names: tuple[str, ...]) -> None:
    node.meta[_MUTATES] = names


def result_is_of(node: Node) -> str | None:
    """Name of the argument node whose tensor object the node returns, as ``add_`` does."""
    return node.meta.get(_RESULT_IS)


def set_result_is(node: Node, name: str | None) -> None:
    node.meta[_RESULT_IS] = name


def updates_buffers(node: Node) -> bool:
    """Whether the node writes a buffer or a parameter of the model."""
    return bool(node.meta.get(_UPDATES_BUFFERS, False))


def set_updates_buffers(node: Node, value: bool) -> None:
    node.meta[_UPDATES_BUFFERS] = value


def is_random(node: Node) -> bool:
    """Whether the node draws random numbers."""
    return bool(node.meta.get(_RANDOM, False))


def set_random(node: Node, value: bool) -> None:
    node.meta[_RANDOM] = value


def checkpoint_region_of(node: Node) -> int | None:
    """Number of the user's activation checkpoint region the node is in."""
    return node.meta.get(_CHECKPOINT)


def set_checkpoint_region(node: Node, region: int) -> None:
    node.meta[_CHECKPOINT] = region


def find_cost(node: Node) -> Any:
    """The ``NodeCost`` of the node, or None if the graph was not annotated with costs."""
    return node.meta.get(_COST)


def cost_of(node: Node) -> Any:
    """The ``NodeCost`` of the node.

    Raises:
        VerifyError: the graph was not annotated with costs.
    """
    if (cost := find_cost(node)) is None:
        raise VerifyError(f"node %{node} has no cost", hint="annotate the graph with costs first")
    return cost


def set_cost(node: Node, cost: object) -> None:
    node.meta[_COST] = cost


def stage_of(node: Node) -> int | None:
    """Stage the node runs on, or None before stages are assigned."""
    return node.meta.get(_STAGE)


def require_stage(node: Node) -> int:
    """Stage of the node.

    Raises:
        VerifyError: the node has none yet.
    """
    if (stage := stage_of(node)) is None:
        raise VerifyError(
            f"node %{node} has no stage",
            at=f"%{node} = {node.target}",
            hint="run assign-stages or balance-stages first",
        )
    return stage


def set_stage(node: Node, stage: int) -> None:
    node.meta[_STAGE] = stage


def stage_count(gm: fx.GraphModule) -> int:
    """S, the number of stages; 0 before stages are assigned."""
    return int(gm.meta.get(_STAGES, 0))


def set_stage_count(gm: fx.GraphModule, stages: int) -> None:
    gm.meta[_STAGES] = stages


def routes_of(node: Node) -> tuple[Route, ...]:
    """Routes of the value to the stages that read it, targets ascending."""
    return tuple(node.meta.get(_ROUTES, ()))


def set_routes(node: Node, routes: tuple[Route, ...]) -> None:
    node.meta[_ROUTES] = routes


def tied_parameters(gm: fx.GraphModule) -> Mapping[str, tuple[int, ...]]:
    """Canonical name of each parameter that several stages hold, with these stages ascending."""
    return dict(gm.meta.get(_TIED, {}))


def set_tied_parameters(gm: fx.GraphModule, tied: Mapping[str, tuple[int, ...]]) -> None:
    gm.meta[_TIED] = dict(tied)


def tied_routes(gm: fx.GraphModule) -> Mapping[str, tuple[Route, ...]]:
    """By canonical name, the routes of the gradients of a tied parameter, first reader first.

    A parameter without routes is summed over its stages at the end of a step.
    """
    return dict(gm.meta.get(_TIED_ROUTES, {}))


def set_tied_routes(gm: fx.GraphModule, routes: Mapping[str, tuple[Route, ...]]) -> None:
    gm.meta[_TIED_ROUTES] = dict(routes)


def canonical_name(gm: fx.GraphModule, name: str) -> str:
    """The name that ``named_parameters()`` or ``named_buffers()`` gives to this entry."""
    return str(gm.meta.get(_CANONICAL, {}).get(name, name))


def set_canonical_names(gm: fx.GraphModule, names: Mapping[str, str]) -> None:
    """Notes, for every name of a parameter or buffer, the first name of the same tensor."""
    gm.meta[_CANONICAL] = dict(names)

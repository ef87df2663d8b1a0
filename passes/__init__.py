"""The passes: one file is one pass, one pass is one rewrite of a graph.

Imported as ``fxpipe.passes``; ``fxpipe/passes`` is a link to this folder.
"""

# From a checkout `import passes` finds this folder too, and would make a second copy of every
# class: isinstance and the registry would disagree about which pass is which.
if __name__ == "passes":
    raise ImportError("import fxpipe.passes, not passes: the passes are part of fxpipe")

from fxpipe.manager import Pass
from fxpipe.passes.assign_stages import AssignStages
from fxpipe.passes.balance_stages import BalanceStages
from fxpipe.passes.follow_owners import FollowOwners
from fxpipe.passes.insert_boundaries import InsertBoundaries
from fxpipe.passes.lower_edges import LowerEdges
from fxpipe.passes.normalize import Normalize
from fxpipe.passes.remove_dead_nodes import RemoveDeadNodes
from fxpipe.passes.reopen_regions import ReopenRegions
from fxpipe.passes.replicate_cheap_nodes import ReplicateCheapNodes
from fxpipe.passes.route_edges import RouteEdges
from fxpipe.passes.tie_parameters import TieParameters

__all__ = [
    "REGISTRY",
    "AssignStages",
    "BalanceStages",
    "FollowOwners",
    "InsertBoundaries",
    "LowerEdges",
    "Normalize",
    "RemoveDeadNodes",
    "ReopenRegions",
    "ReplicateCheapNodes",
    "RouteEdges",
    "TieParameters",
    "default_passes",
]

REGISTRY: dict[str, type[Pass]] = {
    p.name: p
    for p in (
        Normalize,
        BalanceStages,
        AssignStages,
        FollowOwners,
        ReplicateCheapNodes,
        ReopenRegions,
        TieParameters,
        RouteEdges,
        InsertBoundaries,
        LowerEdges,
        RemoveDeadNodes,
    )
}
"""Every pass by its name."""


def default_passes(place: Pass, *, training: bool) -> tuple[Pass, ...]:
    """The passes that turn a traced graph into a staged one, in order.

    Args:
        place: the pass that gives every node its stage.
        training: the graph will run backward.
    """
    return (
        Normalize(training=training),
        RemoveDeadNodes(),
        place,
        ReplicateCheapNodes(),
        ReopenRegions(),
        TieParameters(),
        RouteEdges(),
        InsertBoundaries(),
        LowerEdges(),
    )

"""What lies beside a script: the modules that its stage functions call, with their state."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import fx, nn

from fxpipe import compat
from fxpipe.errors import FxpipeError
from fxpipe.ir.annotations import canonical_name


def module_tree(gm: nn.Module) -> nn.Module:
    """A plain module with the attributes of a graph module, and without its graph.

    Parameters, buffers and leaf modules are shared, under their names.
    """
    assert isinstance(gm, fx.GraphModule)
    root = nn.Module()
    for name, child in gm.named_children():
        root.add_module(name, compat.share_module(child))
    for name, parameter in gm.named_parameters(recurse=False):
        root.register_parameter(name, parameter)
    for name, buffer in gm.named_buffers(recurse=False):
        root.register_buffer(name, buffer)
    for node in gm.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if "." not in name and not hasattr(root, name):
            setattr(root, name, getattr(gm, name))
    return root


def other_names(trees: Mapping[int, nn.Module], graph: fx.GraphModule) -> dict[str, str]:
    """First name in the model of each parameter that a tree holds under another name alone."""
    names = (name for tree in trees.values() for name, _ in tree.named_parameters())
    found = {name: canonical_name(graph, name) for name in names}
    return {name: first for name, first in found.items() if name != first}


def save_state(path: Path, stages: Mapping[int, nn.Module], loss: nn.Module | None) -> None:
    """Writes the modules of a rank, pickled whole.

    Raises:
        FxpipeError: a parameter has no data, or a module cannot be pickled.
    """
    for tree in [*stages.values(), *([loss] if loss else [])]:
        for name, tensor in itertools.chain(tree.named_parameters(), tree.named_buffers()):
            if tensor.is_meta:
                raise FxpipeError(
                    f"{name} has no data to save",
                    at=f"{path.name}: {name} is on the meta device",
                    hint="give the model its parameters before emit(), or print code(rank) alone",
                )
        for name, module in tree.named_modules():
            if type(module).__module__ == "__main__":
                raise FxpipeError(
                    f"{type(module).__name__} cannot be imported by a script",
                    at=f"{path.name}: {name}",
                    hint="define the class in a file of its own, or trace into it",
                )
    try:
        torch.save({"stages": dict(stages), "loss": loss}, path)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise FxpipeError(
            f"the modules of {path.stem} cannot be saved: {error}",
            at=path.name,
            hint="modules that the trace keeps whole must be picklable; trace into them instead",
        ) from error

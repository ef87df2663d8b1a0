"""Prints a graph as text that is stable between runs and readable in a diff."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from fxpipe.ir.annotations import routes_of, stage_of, tied_parameters, tied_routes, value_of

_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.complex64: "c64",
    torch.complex128: "c128",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
}


def format_graph(gm: fx.GraphModule) -> str:
    """One line a node, grouped by stage. Ids, addresses and parameter values are left out."""
    lines: list[str] = []
    current: object = ()
    for node in gm.graph.nodes:
        if node.op == "output":
            lines.append(f"return {format_argument(node.args[0])}")
            continue
        if (stage := stage_of(node)) != current:
            lines.append("unassigned" if stage is None else f"stage {stage}")
            current = stage
        lines.append(f"  {_format_node(node)}")
    chained = tied_routes(gm)
    for name, stages in tied_parameters(gm).items():
        line = f"tied {name}: stages {', '.join(map(str, stages))}"
        lines.append(" -> ".join([line, *map(str, chained.get(name, ()))]))
    return "\n".join(lines) + "\n"


def _format_node(node: fx.Node) -> str:
    arguments = [format_argument(a) for a in node.args]
    arguments += [f"{k}={format_argument(v)}" for k, v in node.kwargs.items()]
    line = f"{node}: {format_type(value_of(node))} = {format_target(node)}({', '.join(arguments)})"
    if routes := routes_of(node):
        line += " -> " + ", ".join(map(str, routes))
    return line


def format_type(value: object) -> str:
    """``f32[8, 16]`` for a tensor, the kind of value for anything else."""
    if isinstance(value, torch.Tensor):
        dtype = _DTYPES.get(value.dtype, str(value.dtype).removeprefix("torch."))
        return f"{dtype}{list(value.shape)}"
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return f"({', '.join(map(format_type, value))})"
    return type(value).__name__


def format_target(node: fx.Node) -> str:
    """The operator as one name; modules, attributes and methods with their path."""
    if node.op in ("placeholder", "get_attr", "call_module", "call_method"):
        return f"{node.op}[{node.target}]"
    if hasattr(node.target, "overload"):  # an operator: its __name__ has no namespace
        return str(node.target)
    return getattr(node.target, "__name__", str(node.target))


def format_argument(argument: object) -> str:
    """An argument as text; nodes get a %, containers keep their shape."""
    if isinstance(argument, fx.Node):
        return f"%{argument}"
    if isinstance(argument, (tuple, list)):
        return f"[{', '.join(map(format_argument, argument))}]"
    if isinstance(argument, Mapping):
        return "{" + ", ".join(f"{k!r}: {format_argument(v)}" for k, v in argument.items()) + "}"
    if isinstance(argument, slice):
        parts = (argument.start, argument.stop, argument.step)
        return f"slice({', '.join(map(format_argument, parts))})"
    return repr(argument)

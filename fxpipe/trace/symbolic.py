"""The fx front end: traces a model with values behind its proxies and builds the graph module."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.compat import non_persistent_buffers, state_of
from fxpipe.errors import FxpipeError, TraceError
from fxpipe.trace.assignments import refuse_leaks
from fxpipe.trace.inputs import BoundInputs, InputBinder, InputSpec, without_data
from fxpipe.trace.proxies import UntraceableError
from fxpipe.trace.source import place_of
from fxpipe.trace.traced import Traced
from fxpipe.trace.tracer import ValueTracer


def trace_symbolically(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    leaves: Sequence[str | type[nn.Module]],
) -> Traced:
    """Captures a model with torch.fx.

    Raises:
        TraceError: the model's code does what a graph cannot hold.
        InputError: the arguments do not bind to forward.
    """
    binder = InputBinder(model)
    bound = binder.bind(args, kwargs)
    tracer = ValueTracer(model, device_for(model, bound), leaves)
    graph = _capture(tracer, binder, bound, args, kwargs)
    module = graph_module(model, graph, tracer.state.constants)
    assert tracer.output is not None
    return Traced(
        module=module,
        inputs=InputSpec(binder, tracer.placeholders, without_data(bound)),
        output=tracer.output,
        front_end="fx",
        guards=tuple(tracer.guards.values()),
    )


def device_for(model: nn.Module, bound: BoundInputs) -> torch.device:
    """The device the graph will run on, as far as can be told: the inputs', then the model's."""
    for tensor in (*bound.tensors, *model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            return tensor.device
    return torch.device("cpu")


def _capture(
    tracer: ValueTracer,
    binder: InputBinder,
    bound: BoundInputs,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> fx.Graph:
    tracer.state.install()
    changes = []
    try:
        graph = tracer.capture(binder, bound, args, kwargs)
    except FxpipeError:
        raise
    # the model's own code ran: whatever it raises is the reason why there is no graph
    except Exception as error:
        raise explained(tracer.model, error, ValueTracer.run_model.__code__) from error
    finally:
        changes = tracer.state.restore()
    try:
        refuse_leaks(changes)
    except UntraceableError as error:
        raise explained(tracer.model, error, ValueTracer.run_model.__code__) from None
    return graph


def explained(model: nn.Module, error: Exception, called_by: CodeType) -> TraceError:
    """What the model's code raised, with the module and the line that did.

    Args:
        model: the model.
        error: what left it.
        called_by: code of the function that called the model.
    """
    place = place_of(error.__traceback__, called_by)
    module = place.module or model
    fqn = next((name for name, m in model.named_modules() if m is module), "")
    subject = f"{type(module).__name__} ({fqn})" if fqn else type(module).__name__
    way_out = f"keep the module as one node with leaf_modules=[{fqn!r}], or " if fqn else ""
    if isinstance(error, UntraceableError):
        branches = error.problem.startswith("branches")
        rewrite = "rewrite the branch with torch.where" if branches else "rewrite the line"
        hint = error.hint or way_out + rewrite
        return TraceError(f"{subject} {error.problem}", at=place.line, hint=hint)
    hint = f"{way_out}rewrite the line"
    reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return TraceError(f"{subject} failed while it was traced: {reason}", at=place.line, hint=hint)


def graph_module(
    model: nn.Module, graph: fx.Graph, constants: Mapping[str, Tensor]
) -> fx.GraphModule:
    """A module for the graph; shares what the graph names with the model, in the model's order."""
    modules = {str(n.target) for n in graph.nodes if n.op == "call_module"}
    tensors = {str(n.target) for n in graph.nodes if n.op == "get_attr"}
    gm = fx.GraphModule(nn.Module(), fx.Graph(), class_name=type(model).__name__)
    _share(model, gm, "", modules, tensors | _first_names(model, modules))
    for name in tensors & set(constants):
        gm.register_buffer(name, constants[name], persistent=False)
    gm.training = model.training
    gm.graph = graph
    return gm


def _first_names(model: nn.Module, modules: Collection[str]) -> set[str]:
    """Names, in the model, of what the called modules hold; a tied tensor keeps its first name."""
    held = {
        id(tensor)
        for module in map(model.get_submodule, modules)
        for tensor in (*module.parameters(), *module.buffers())
    }
    named = (*model.named_parameters(), *model.named_buffers())
    return {name for name, tensor in named if id(tensor) in held}


def _share(
    source: nn.Module,
    target: nn.Module,
    prefix: str,
    modules: Collection[str],
    tensors: Collection[str],
) -> None:
    parameters, buffers = state_of(source)
    for name, parameter in parameters.items():
        if prefix + name in tensors:
            target.register_parameter(name, parameter)
    for name, buffer in buffers.items():
        if prefix + name in tensors:
            persistent = name not in non_persistent_buffers(source)
            target.register_buffer(name, buffer, persistent=persistent)
    for name, value in vars(source).items():
        if isinstance(value, Tensor) and prefix + name in tensors:
            target.register_buffer(name, value, persistent=False)
    for name, child in source.named_children():
        path = prefix + name
        if path in modules:
            target.add_module(name, child)
        elif any(t.startswith(f"{path}.") for t in (*modules, *tensors)):
            container = nn.Module()
            container.training = child.training
            target.add_module(name, container)
            _share(child, container, f"{path}.", modules, tensors)

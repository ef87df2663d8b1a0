"""The fallback front end: torch.export captures the model, and its graph is traced like a model.

torch.export runs the model on tensors and not on proxies, so it also takes code that looks at the
type of what it is given, in C or in libraries. What it captures is traced once more with values
behind proxies: nodes then know the same as nodes of the fx front end, and have the original names.
"""

from __future__ import annotations

import dataclasses
import logging
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe import compat
from fxpipe.errors import FxpipeError, TraceError
from fxpipe.ir.annotations import value_of
from fxpipe.ir.edges import attribute
from fxpipe.trace.exporting import LINE, REGION, SYMBOLS, Exported, Slot, called_by, export
from fxpipe.trace.inputs import InputBinder, InputSpec, without_data
from fxpipe.trace.proxies import UntraceableError, ValueProxy, map_values, proxies_in
from fxpipe.trace.replay import in_plain_containers
from fxpipe.trace.symbolic import device_for, explained, graph_module
from fxpipe.trace.traced import Traced
from fxpipe.trace.tracer import ValueTracer

log = logging.getLogger(__name__)

# about what is guarded, or about data: a rank that runs a part of the model cannot raise the user's
# error
_CHECKS = frozenset(
    {
        "_assert_scalar",
        "_assert_tensor_metadata",
        "_has_compatible_shallow_copy_type",
        "sym_constrain_range",
        "sym_constrain_range_for_size",
    }
)


def trace_by_export(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    leaves: Sequence[str | type[nn.Module]],
) -> Traced:
    """Captures a model with torch.export: operators of ATen, sizes open where possible.

    Raises:
        TraceError: torch.export cannot take the model, or would lose a part of it.
        InputError: the arguments do not bind to forward.
    """
    if leaves:
        raise TraceError("torch.export keeps no module as one node, as leaf_modules asks for")
    binder = InputBinder(model)
    bound = binder.bind(args, kwargs)
    device = device_for(model, bound)
    why = ""
    try:
        exported = export(model, device, binder, bound, args, kwargs, dynamic=True)
    # whatever the model raises with open sizes, it may not raise with those of the example
    except Exception as error:
        if isinstance(error, (FxpipeError, UntraceableError)):
            raise _explained(model, error) from error
        log.debug("export with open sizes failed: %s", error)
        why = "every size is that of the example"
        try:
            exported = export(model, device, binder, bound, args, kwargs, dynamic=False)
        except Exception as again:
            raise _explained(model, again) from again
    tracer = ExportTracer(model, device, exported)
    tracer.state.install()
    try:
        graph = tracer.capture(binder, bound, args, kwargs)
    except UntraceableError as error:
        problem = f"{type(model).__name__} {error.problem}, also where torch.export captures it"
        raise TraceError(problem, at=tracer.place()[0], hint=error.hint) from error
    finally:
        tracer.state.restore()
    return Traced(
        module=graph_module(model, graph, tracer.state.constants),
        inputs=InputSpec(binder, tracer.placeholders, without_data(bound)),
        output=exported.output,
        front_end="export",
        guards=tuple(tracer.guards.values()),
        why=why,
    )


def _explained(model: nn.Module, error: Exception) -> FxpipeError:
    if isinstance(error, FxpipeError):
        return error
    return explained(model, error, called_by)


class ExportTracer(ValueTracer):
    """Traces the graph of an exported model in place of its forward.

    Args:
        model: the model itself.
        device: the device to trace on.
        exported: what torch.export made of it.
    """

    def __init__(self, model: nn.Module, device: torch.device, exported: Exported) -> None:
        super().__init__(model, device, ())
        self._exported = exported
        self._at: fx.Node | None = None  # the exported node that is traced

    def run_model(self) -> tuple[Any, ...]:
        _, bound, _, _ = self.arguments
        inputs = [p for p in self.make_placeholders(bound) if isinstance(p, ValueProxy)]
        if not hasattr(self._exported.module, compat.EXPORT_GUARDS):
            self._guard_all(inputs)
        _drop_checks(self._exported.module.graph)
        outputs = self._run_graph(self._exported.module, inputs)
        count = len(outputs) - len(self._exported.assigned)
        # all values first: buffers may be set to one another
        values = [self.attribute(v) if isinstance(v, Tensor) else v for v in outputs[count:]]
        for name, value in zip(self._exported.assigned, values, strict=True):
            self.assignments.note(name, value)
        self.assignments.write_back()
        return tuple(
            outputs[leaf.position] if isinstance(leaf, Slot) else leaf
            for leaf in self._exported.leaves
        )

    def place(self) -> tuple[str, tuple[tuple[str, str], ...]]:
        if self._at is None:
            return "", ()
        return compat.annotation_of(self._at, LINE) or "", _module_path(self._at)

    @property
    def current_region(self) -> int | None:
        if self._at is None:
            return None
        region: int | None = compat.annotation_of(self._at, REGION)
        return region

    def _guard_all(self, inputs: Sequence[ValueProxy]) -> None:
        for proxy in inputs:
            if proxy.value.dim():
                sizes = self.record("call_method", "size", (proxy,), {})
                self.guard(sizes.node, sizes.value)

    def _run_guards(self, guards: nn.Module, inputs: Sequence[Any]) -> None:
        """Looks at sizes as torch.export says that the model did; the looks become guards."""
        before = set(self.guards)

        def name_lines(condition: str) -> None:
            named = re.sub(
                r"\binputs_(\d+)\b", lambda m: self.placeholders[int(m[1])].path, condition
            )
            for name in self.guards.keys() - before:
                line = f"{named}, as torch.export found"
                self.guards[name] = dataclasses.replace(self.guards[name], line=line)
            before.update(self.guards)

        compat.run_export_guards(guards, inputs, name_lines)

    def _run_graph(self, module: fx.GraphModule, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Traces a graph. Returns its outputs."""
        known: dict[fx.Node, Any] = {}
        given = iter(inputs)

        def look_up(leaf: Any) -> Any:
            return known[leaf] if isinstance(leaf, fx.Node) else leaf

        for node in module.graph.nodes:
            args = map_values(look_up, in_plain_containers(node.args))
            if node.op == "output":
                return tuple(args[0])
            self._at = node
            if node.op == "placeholder":
                known[node] = next(given)
            elif node.op == "get_attr":
                known[node] = self._attribute(module, str(node.target))
            elif node.op == "call_module":
                assert node.target == compat.EXPORT_GUARDS
                self._run_guards(module.get_submodule(node.target), args)
            else:
                kwargs = map_values(look_up, in_plain_containers(node.kwargs))
                known[node] = self._run_node(node, args, kwargs)
        raise AssertionError("a graph ends with its output")

    def _attribute(self, module: fx.GraphModule, target: str) -> Any:
        held = attribute(module, target)
        if not isinstance(held, Tensor):
            return held  # the graph of a region
        name = self._exported.state.name_of(held)
        if name is not None:
            return self.state.named(name)  # becomes a node where it is read first
        if isinstance(held, compat.FakeTensor):
            raise UntraceableError("makes a constant of a tensor without data")
        return held

    def _run_node(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target: Any = node.target
        if target in compat.EXPORTED_REGIONS:
            return self._run_region(target, args)
        if isinstance(target, compat.HigherOrderOperator):
            raise UntraceableError(f"calls {target}, which no stage can hold")
        of_torch = isinstance(target, compat.OpOverload)
        if not of_torch and not proxies_in((args, kwargs)):
            return target(*args, **kwargs)  # what is known by now
        if target is operator.getitem and not isinstance(args[0], ValueProxy):
            return args[0][args[1]]  # a container of proxies
        return self.record("call_function", target, args, kwargs, name=node.name)

    def _run_region(self, target: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if target is compat.EXPORTED_REGIONS[0]:
            enabled, graph, *inputs = args
            with torch.enable_grad() if enabled else torch.no_grad():
                return self._run_graph(graph, inputs)
        device, dtype, enabled, cache_enabled, graph, *inputs = args
        with torch.autocast(device, dtype, enabled, cache_enabled):
            return self._run_graph(graph, inputs)


def _drop_checks(graph: fx.Graph) -> None:
    """Erases assertions, and the numbers that only they read."""
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function" or node.users:
            continue
        name = getattr(node.target, "__name__", "").partition(".")[0]
        is_number = isinstance(value_of(node), (int, float, *SYMBOLS))
        if name in _CHECKS or is_number:
            graph.erase_node(node)


def _module_path(node: fx.Node) -> tuple[tuple[str, str], ...]:
    """The modules that an exported node was made in, named as in the model."""
    entries = list((node.meta.get("nn_module_stack") or {}).values())
    path = []
    for fqn, cls in entries[1:]:  # the first is what torch.export was given
        name = fqn.partition("@")[0].removeprefix("model").removeprefix(".")
        path.append((name, cls if isinstance(cls, type) else str(cls).rpartition(".")[2]))
    return tuple((name, cls.__name__ if isinstance(cls, type) else cls) for name, cls in path)

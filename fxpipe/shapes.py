"""Shapes of what crosses, for any shape of the inputs, without running the model.

The graph is run once on fake tensors for each new shape of a microbatch; every rank does the same,
so no rank ever sends a shape to another.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fxpipe import compat
from fxpipe.errors import InputError
from fxpipe.ir.annotations import origin_of, routes_of, value_of
from fxpipe.runtime.stage import Layout, TensorLayout, layout_of
from fxpipe.runtime.stepper import restored_autocast
from fxpipe.runtime.transport.interface import first_line
from fxpipe.trace.fold import Folder, Unknown
from fxpipe.trace.guards import Guard, plain_value
from fxpipe.trace.replay import Replay, fake_like, fake_state

log = logging.getLogger(__name__)

_KEPT = 64
"""Shapes kept; beyond, the one not used for longest goes. A shape costs some kilobytes."""


class _Found(NamedTuple):
    """What a run told about one shape of the inputs."""

    layout: Layout
    outputs: tuple[tuple[int, ...] | None, ...]  # shape of each leaf of the output; None: no tensor


class ShapeProbe:
    """Finds the layout of every edge and the value of every size for given input shapes.

    Args:
        gm: the traced graph, before its edges are lowered.
        edges: for each edge, the name of the node it carries.
        sizes: names of the nodes without a tensor that another stage reads.
        fixed: layouts of the edges after these, which no input changes.
        guards: what must be as it was in the trace for the graph to be right.
        training: whether gradients are on when the stages run; some kernels differ.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        edges: Sequence[str],
        sizes: Sequence[str],
        fixed: Sequence[TensorLayout] = (),
        *,
        guards: Sequence[Guard] = (),
        training: bool,
    ) -> None:
        nodes = {node.name: node for node in gm.graph.nodes}
        self._edges = [nodes[name] for name in edges]
        self._sizes = [nodes[name] for name in sizes]
        self._fixed, self._training = tuple(fixed), training
        self._gm, self._guards = gm, {guard.node: guard for guard in guards}
        self._mode = compat.fake_mode()
        with self._mode:
            self._state = fake_state(gm)
        self._found: OrderedDict[object, _Found | Guard] = OrderedDict()
        self._output_dims: tuple[int | None, ...] | None = None

    def failing(self, inputs: Sequence[Tensor]) -> Guard | None:
        """The guard that does not hold for a microbatch of this shape: the graph is wrong for it.

        Returns:
            None if all hold.
        """
        found = self._find(inputs)
        return found if isinstance(found, Guard) else None

    def layout(self, inputs: Sequence[Tensor]) -> Layout:
        """The layout of a microbatch with inputs of these shapes.

        Raises:
            InputError: the graph was traced for other sizes.
        """
        found = self._find(inputs)
        if isinstance(found, Guard):
            raise InputError(
                "the graph is for other sizes: the model takes another way at these",
                at=found.line,
                hint="trace again for this batch",
            )
        return found.layout

    def output_dims(
        self, inputs: Sequence[Tensor], rows: Sequence[int | None]
    ) -> tuple[int | None, ...]:
        """For each leaf of the model's output, the dimension that grows with the rows.

        Found once, by a run with more rows. Where that cannot be run, or where several dimensions
        grow, rows are taken to be in dimension 0.

        Args:
            inputs: a microbatch.
            rows: dimension of the rows of each input; None where it has none.

        Returns:
            None for what is no tensor, and for a tensor whose shape no number of rows changes; 0
            for one without dimensions.
        """
        if self._output_dims is None:
            self._output_dims = self._compare_outputs(inputs, rows)
        return self._output_dims

    def _compare_outputs(
        self, inputs: Sequence[Tensor], rows: Sequence[int | None]
    ) -> tuple[int | None, ...]:
        found = self._find(inputs)
        assert not isinstance(found, Guard)
        if not any(found.outputs):
            return tuple(map(_grown_dim, found.outputs, found.outputs))
        for more in self._with_more_rows(inputs, rows):
            try:
                other = self._find(more)
            # nobody asked for this number of rows: whatever it raises, it cannot be run
            except Exception as error:
                log.debug("rows=%s cannot be run: %s", [tuple(t.shape) for t in more], error)
                continue
            if not isinstance(other, Guard):
                return tuple(map(_grown_dim, found.outputs, other.outputs))
        return (0,) * len(found.outputs)

    def _with_more_rows(
        self, inputs: Sequence[Tensor], rows: Sequence[int | None]
    ) -> Iterator[list[Tensor]]:
        """The inputs with one row more, and with twice the rows: the graph may be for even ones."""
        for twice in (False, True):
            with self._mode:
                fakes = [fake_like(tensor) for tensor in inputs]
                for i, dim in enumerate(rows):
                    if dim is not None and fakes[i].dim():
                        added = fakes[i] if twice else fakes[i].narrow(dim, 0, 1)
                        fakes[i] = torch.cat([fakes[i], added], dim)
            yield fakes

    def _find(self, inputs: Sequence[Tensor]) -> _Found | Guard:
        key = (*((tuple(t.shape), t.stride(), t.dtype) for t in inputs), _ambient_autocast())
        if key in self._found:
            self._found.move_to_end(key)
            return self._found[key]
        found = self._found[key] = self._propagate(inputs)
        if len(self._found) > _KEPT:
            self._found.popitem(last=False)
        return found

    def _propagate(self, inputs: Sequence[Tensor]) -> _Found | Guard:
        log.debug("shapes=%s propagated", [tuple(t.shape) for t in inputs])
        with self._mode, torch.set_grad_enabled(self._training), restored_autocast():
            run = _GuardedRun(self._gm, self._state, self._guards)
            try:
                outputs = run.run(*map(fake_like, inputs))
            except _GuardFailed as failed:
                return failed.guard
        edges = tuple(layout_of(run.env[node]) for node in self._edges)
        return _Found(
            Layout(edges + self._fixed, tuple(plain_value(run.env[node]) for node in self._sizes)),
            tuple(tuple(v.shape) if isinstance(v, Tensor) else None for v in outputs),
        )


class _GuardFailed(Exception):  # noqa: N818 - an answer, not an error
    def __init__(self, guard: Guard) -> None:
        super().__init__(guard)
        self.guard = guard


class _GuardedRun(Replay):
    """Stops at the first guard that does not hold: behind it the graph may not even fit."""

    def __init__(
        self, gm: fx.GraphModule, state: Mapping[str, Tensor], guards: Mapping[str, Guard]
    ) -> None:
        super().__init__(gm, state)
        self._guards = guards
        self._folder = Folder(lambda node: self.env.get(node, value_of(node)), after_trace=True)

    def run_node(self, n: fx.Node) -> Any:
        try:
            value = super().run_node(n)
        except Exception as error:  # a model may raise anything on a shape it was not made for
            raise InputError(
                f"the model fails on a microbatch of these shapes: {first_line(error)}",
                at=origin_of(n),
                hint="the rows and the number of microbatches decide them",
            ) from error
        guard = self._guards.get(n.name)
        if guard is not None and not guard.holds(self._seen(n, value)):
            raise _GuardFailed(guard)
        return value

    def _seen(self, node: fx.Node, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        try:
            with compat.no_fake_mode():
                return self._folder.value(node)
        except Unknown:
            return None  # too large to be computed here: as if it were another value


def _grown_dim(one: tuple[int, ...] | None, other: tuple[int, ...] | None) -> int | None:
    if one is None or other is None:
        return None
    if len(one) != len(other):
        return 0
    grown = [dim for dim, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    if len(grown) == 1:
        return grown[0]
    return 0 if grown or not one else None


def _ambient_autocast() -> Hashable:
    """What the caller's own ``torch.autocast`` around a step makes of dtypes."""
    return tuple(
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in ("cpu", "cuda")
    )


def edge_names(gm: fx.GraphModule) -> list[str]:
    """For each edge of a routed graph, by index, the name of the node it carries."""
    named = {route.edge: node.name for node in gm.graph.nodes for route in routes_of(node)}
    return [named[edge] for edge in sorted(named)]

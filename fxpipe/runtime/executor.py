"""Walks the program of one rank: binds every action to a closure once, then calls them in order.

**Terms.** A *slot* holds what one action leaves for a later one of the same stage and microbatch.
*Work* is the handle of a transfer under way.
"""

from __future__ import annotations

import dataclasses
import re
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import ScheduleError, TransportError
from fxpipe.runtime.engine import Engine
from fxpipe.runtime.stage import Layout, Receive, Stage, TensorLayout, TiedLink
from fxpipe.runtime.transport.interface import Transport, Work, wait_all
from fxpipe.schedule.actions import Action, Kind

FORWARD, BACKWARD = 0, 1
_BACKWARD_KINDS = (Kind.RECV_B, Kind.B, Kind.I, Kind.W, Kind.SEND_B)


@dataclasses.dataclass
class Feed:
    """What one step gives to a rank, by microbatch.

    Args:
        batch: the model's inputs, [M][inputs].
        targets: the target of each microbatch, [M]; read on the last stage alone.
        weights: what each microbatch's loss counts in that of the batch, [M].
        layouts: shapes of each microbatch, [M].
        output_gradients: gradient of each leaf of the model's output, [M][leaves], where the loss
            is computed outside; read on the last stage alone.
    """

    batch: Sequence[Sequence[Tensor]]
    targets: Sequence[Any]
    weights: Sequence[float]
    layouts: Sequence[Layout]
    output_gradients: Sequence[Sequence[Tensor | None]] = ()


class _Slots:
    """What one stage holds between its actions, by microbatch."""

    def __init__(self, stage: Stage, engine: Engine, microbatches: int) -> None:
        self.stage, self.engine = stage, engine
        self.arriving: list[list[Work]] = [[] for _ in range(microbatches)]
        self.received: list[list[Tensor]] = [[] for _ in range(microbatches)]
        self.outputs: list[Sequence[Any]] = [()] * microbatches
        self.leaving: list[list[Work]] = [[] for _ in range(microbatches)]
        self.gradients_arriving: list[list[Work]] = [[] for _ in range(microbatches)]
        self.gradients: list[list[Tensor | None]] = [[] for _ in range(microbatches)]
        self.later: list[list[Tensor | None]] = [[] for _ in range(microbatches)]
        self.input_gradients: list[list[Tensor | None]] = [[] for _ in range(microbatches)]


class Executor:
    """One rank's program, bound to its stages, its transport and its engines.

    Args:
        program: actions of this rank, transfers included.
        stages: the rank's stages, by index.
        engines: one a stage.
        placement: rank of every stage.
        transport: carries tensors to and from other ranks.
        device: where receive buffers are made.
        microbatches: M.
    """

    def __init__(
        self,
        program: Sequence[Action],
        *,
        stages: Mapping[int, Stage],
        engines: Mapping[int, Engine],
        placement: Sequence[int],
        transport: Transport,
        device: torch.device,
        microbatches: int,
    ) -> None:
        self.program = tuple(program)
        self.rank = transport.rank
        self._placement = tuple(placement)
        self._transport, self._device = transport, device
        self._slots = {s: _Slots(stages[s], engines[s], microbatches) for s in stages}
        self._pending: deque[Work] = deque()
        self._layouts: Sequence[Layout] = ()
        self._feed = Feed((), (), (), ())
        self._microbatches = microbatches
        self._has_backward = any(a.kind is Kind.B or a.kind is Kind.I for a in self.program)
        self.model_outputs: list[tuple[Any, ...]] = [()] * microbatches
        self.losses: list[Tensor] = [torch.empty(0)] * microbatches
        backward = [i for i, a in enumerate(self.program) if a.kind in _BACKWARD_KINDS]
        self._first_backward = min(backward, default=len(self.program))
        self._next, self._end = 0, len(self.program)
        self._acts: list[Callable[[], None]] = []
        self._bind_all()

    def _bind_all(self) -> None:
        bind: dict[Kind, Callable[[_Slots, int], Callable[[], None]]] = {
            Kind.F: self._bind_forward,
            Kind.B: self._bind_backward,
            Kind.I: self._bind_backward,
            Kind.W: self._bind_weight,
            Kind.RECV_F: self._bind_receive,
            Kind.SEND_F: self._bind_send,
            Kind.RECV_B: self._bind_receive_gradients,
            Kind.SEND_B: self._bind_send_gradients,
        }
        self._acts = [bind[a.kind](self._slots[a.stage], a.microbatch) for a in self.program]

    # ---------------------------------------------------------------------------------------
    # Running

    def load(self, feed: Feed, *, forward_only: bool = False) -> None:
        """Sets what the next step reads.

        Args:
            feed: by microbatch.
            forward_only: `run` stops before the first action of backward, until `resume`.
        """
        self._feed, self._layouts, self._next = feed, feed.layouts, 0
        self._end = self._first_backward if forward_only else len(self.program)
        self.model_outputs = [()] * self._microbatches
        self.losses = [torch.empty(0)] * self._microbatches

    def resume(self, output_gradients: Sequence[Sequence[Tensor | None]]) -> None:
        """Sets the gradients of the model's output; `run` goes on with backward."""
        self._feed.output_gradients = output_gradients
        self._end = len(self.program)

    def run(self) -> None:
        """Runs the program as far as it was loaded; returns when every send has left."""
        for index in range(self._next, self._end):
            self._next = index
            self._acts[index]()
        self._next = self._end
        self.finish()

    def finish(self) -> None:
        """Waits for the sends under way."""
        while self._pending:
            wait_all([self._pending.popleft()])

    def drop(self) -> None:
        """Forgets the step that failed: transfers, activations and gradients under way."""
        self._pending.clear()
        self._feed, self._layouts = Feed((), (), (), ()), ()
        for slots in self._slots.values():
            slots.engine.drop()
        self._slots = {
            s: _Slots(old.stage, old.engine, self._microbatches) for s, old in self._slots.items()
        }
        self._bind_all()

    @property
    def engines(self) -> dict[int, Engine]:
        """What runs each stage."""
        return {s: slots.engine for s, slots in self._slots.items()}

    def use_engines(self, engines: Mapping[int, Engine]) -> None:
        """Runs the stages with other engines from the next step on."""
        for s, engine in engines.items():
            self._slots[s].engine = engine
        self._bind_all()

    @property
    def current(self) -> Action | None:
        """The action that runs, or that failed; None once all that was loaded has run."""
        return self.program[self._next] if self._next < self._end else None

    def advance(self) -> bool:
        """Runs the next action if everything it waits for is there; says whether it did."""
        if self._next == self._end or not self._is_ready(self.program[self._next]):
            return False
        self._acts[self._next]()
        self._next += 1
        return True

    def _is_ready(self, action: Action) -> bool:
        slots = self._slots[action.stage]
        waits: Sequence[Work] = ()
        if action.kind is Kind.F:
            waits = slots.arriving[action.microbatch]
        elif action.kind in (Kind.B, Kind.I):
            waits = slots.gradients_arriving[action.microbatch]
        return all(work.is_completed() for work in waits)

    def origin_of(self, error: BaseException) -> str:
        """Module, class and source line of the node that raised; empty if that is not known."""
        action = self.current
        if action is None:
            return ""
        return self._slots[action.stage].stage.origins.get(_failing_node(error), "")

    # ---------------------------------------------------------------------------------------
    # One binder a kind of action

    def _bind_receive(self, slots: _Slots, m: int) -> Callable[[], None]:
        peers = tuple(
            (r.edge, self._placement[r.source], 2 * r.edge + FORWARD) for r in slots.stage.receives
        )
        receive, device = self._transport.recv, self._device

        def run() -> None:
            edges = self._layouts[m].edges
            works, views = [], []
            for edge, peer, tag in peers:
                buffer, view = edges[edge].empty(device)
                works.append(receive([buffer], peer, tag))
                views.append(view)
            slots.arriving[m], slots.received[m] = works, views

        return run

    def _bind_forward(self, slots: _Slots, m: int) -> Callable[[], None]:
        stage, engine = slots.stage, slots.engine
        is_last = stage.index == len(self._placement) - 1
        num_sent, has_loss = stage.num_sent, stage.has_loss
        edges = tuple(r.edge for r in stage.receives)

        def run() -> None:
            wait_all(slots.arriving[m])
            slots.arriving[m] = []
            batch, layout = self._feed.batch[m], self._layouts[m]
            inputs: list[Any] = [batch[i] for i in stage.batch_inputs]
            inputs += [layout.sizes[i] for i in stage.sizes]
            received = slots.received[m]
            if layout.has_gaps:
                received = [
                    layout.edges[e].with_gaps(v) for e, v in zip(edges, received, strict=True)
                ]
            inputs += received
            slots.received[m] = []
            if has_loss:
                inputs.append(self._feed.targets[m])
            outputs = engine.forward(m, inputs)
            if is_last:
                self._keep_results(m, outputs[num_sent:], has_loss)
            slots.outputs[m] = outputs[:num_sent]

        return run

    def _keep_results(self, m: int, results: Sequence[Any], has_loss: bool) -> None:
        kept = [r.detach() if isinstance(r, Tensor) else r for r in results]
        if has_loss:
            self.losses[m] = kept.pop()
        self.model_outputs[m] = tuple(kept)

    def _bind_send(self, slots: _Slots, m: int) -> Callable[[], None]:
        answered = {g.edge for g in slots.stage.gradients} if self._has_backward else set()
        sends = tuple(
            (s.output, s.edge, self._placement[s.target], 2 * s.edge + FORWARD, s.edge in answered)
            for s in slots.stage.sends
        )

        def run() -> None:
            outputs, edges = slots.outputs[m], self._layouts[m].edges
            for output, edge, peer, tag, is_answered in sends:
                work = self._send(outputs[output], edges[edge], peer, tag)
                (slots.leaving[m] if is_answered else self._pending).append(work)
            slots.outputs[m] = ()

        return run

    def _bind_receive_gradients(self, slots: _Slots, m: int) -> Callable[[], None]:
        stage = slots.stage
        of_outputs = tuple(
            (g.edge, self._placement[g.source], 2 * g.edge + BACKWARD) for g in stage.gradients
        )
        passed_on: tuple[Receive | TiedLink, ...] = (*stage.receives, *stage.tied)
        of_receives = tuple(
            (i, edge, self._placement[source], 2 * edge + BACKWARD)
            for i, r in enumerate(passed_on)
            if r.gradient_from is not None
            for edge, source in (r.gradient_from,)
        )
        # Messages between two ranks pair by order: gradients are received as they are sent, by
        # edge.
        order = sorted(
            [(edge, peer, tag, None) for edge, peer, tag in of_outputs]
            + [(edge, peer, tag, i) for i, edge, peer, tag in of_receives],
            key=lambda entry: entry[0],
        )
        receive, device = self._transport.recv, self._device
        num_later = len(stage.receives) + len(stage.tied)

        def run() -> None:
            edges = self._layouts[m].edges
            works: list[Work] = []
            gradients: list[Tensor | None] = []
            later: list[Tensor | None] = [None] * num_later
            for edge, peer, tag, i in order:
                buffer, view = edges[edge].empty(device)
                works.append(receive([buffer], peer, tag))
                if i is None:
                    gradients.append(view)
                else:
                    later[i] = view
            slots.gradients_arriving[m] = works
            slots.gradients[m], slots.later[m] = gradients, later

        return run

    def _bind_backward(self, slots: _Slots, m: int) -> Callable[[], None]:
        stage, engine = slots.stage, slots.engine
        nothing: list[Tensor | None] = [None] * (len(stage.receives) + len(stage.tied))

        def run() -> None:
            wait_all(slots.gradients_arriving[m])
            slots.gradients_arriving[m] = []
            wait_all(slots.leaving[m])  # at once: the gradient of a value comes after the value
            slots.leaving[m] = []
            gradients = slots.gradients[m]
            if stage.takes_output_gradients:
                gradients = [*gradients, *self._feed.output_gradients[m]]
            if stage.has_loss:
                loss = self.losses[m]
                gradients = [*gradients, loss.new_full((), self._feed.weights[m])]
            slots.input_gradients[m] = engine.backward(m, gradients, slots.later[m] or nothing)
            slots.gradients[m], slots.later[m] = [], []

        return run

    def _bind_weight(self, slots: _Slots, m: int) -> Callable[[], None]:
        engine = slots.engine

        def run() -> None:
            engine.weight(m)

        return run

    def _bind_send_gradients(self, slots: _Slots, m: int) -> Callable[[], None]:
        passed_on: tuple[Receive | TiedLink, ...] = (*slots.stage.receives, *slots.stage.tied)
        sends = tuple(
            (i, r.edge, self._placement[r.gradient_to], 2 * r.edge + BACKWARD)
            for i, r in enumerate(passed_on)
            if r.gradient_to is not None
        )
        device = self._device

        def run() -> None:
            gradients, edges = slots.input_gradients[m], self._layouts[m].edges
            for i, edge, peer, tag in sends:
                gradient = gradients[i]
                if gradient is None:  # the stage did not use the value this time
                    gradient = edges[edge].zeros(device)
                self._pending.append(self._send(gradient, edges[edge], peer, tag))
            slots.input_gradients[m] = []

        return run

    def _send(self, value: Tensor, layout: TensorLayout, peer: int, tag: int) -> Work:
        if value.shape != layout.shape or value.dtype is not layout.dtype:
            raise TransportError(
                f"edge {tag // 2} carries {value.dtype} {list(value.shape)}, "
                f"but rank {peer} expects {layout.dtype} {list(layout.shape)}",
                at=str(self.current),
                hint="shapes and dtypes must follow from those of the inputs; put a module whose "
                "output depends on data or on a mode outside the model on one stage",
            )
        pending = self._pending
        while pending and pending[0].is_completed():
            pending.popleft()  # a handle keeps its tensor alive
        return self._transport.send([layout.for_transfer(value)], peer, tag)


def run_cooperatively(executors: Sequence[Executor], running: list[Executor]) -> None:
    """Runs the programs of several ranks in this thread.

    The last rank that can advance does, but no stage goes forward before the one in front of it. So
    a microbatch goes forward through all stages before the next one starts, and random numbers are
    drawn in the order of the plain model.

    Args:
        executors: by rank.
        running: set to the executor that runs, so that a caller knows whose error it catches.

    Raises:
        ScheduleError: no rank can advance, with the action each of them waits at.
    """
    ran: set[tuple[int, int]] = set()  # stages and microbatches that went forward

    def is_early(action: Action | None) -> bool:
        if action is None or action.kind is not Kind.F or action.stage == 0:
            return False
        return (action.stage - 1, action.microbatch) not in ran

    turns = executors[::-1]
    while any(executor.current is not None for executor in executors):
        # stable: early ones come last, for orders in which a stage does go first
        for executor in sorted(turns, key=lambda e: is_early(e.current)):
            running[:] = [executor]
            action = executor.current
            if executor.advance():
                if action is not None and action.kind is Kind.F:
                    ran.add((action.stage, action.microbatch))
                break
        else:
            running.clear()
            stuck = [f"rank {e.rank} waits at {e.current}" for e in executors if e.current]
            raise ScheduleError("the ranks wait for one another", at="; ".join(stuck))
    for executor in executors:
        running[:] = [executor]
        executor.finish()


def _failing_node(error: BaseException) -> str:
    """Name of the graph node whose line of generated code raised; empty if none did."""
    found = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename.startswith("<eval_with_key>") and frame.line:
            match = re.match(r"(\w+)\s*=", frame.line)
            found = match[1] if match else found
    return found

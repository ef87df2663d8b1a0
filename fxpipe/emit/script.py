"""Writes the scripts of a pipeline: one a rank, with its stages and its order, and one to start."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import jinja2
import torch
from torch import Tensor, nn

from fxpipe.emit.code import FunctionCode, function_code, merge_imports
from fxpipe.emit.literals import literal
from fxpipe.emit.loss import LossCode, loss_code
from fxpipe.emit.order import step_lines
from fxpipe.emit.source import Compiled, Plan
from fxpipe.emit.state import module_tree, other_names, save_state
from fxpipe.ir.text import format_type
from fxpipe.options import CompileOptions
from fxpipe.runtime.loss import output_is_loss
from fxpipe.runtime.microbatches import split_target
from fxpipe.runtime.script_tables import Shapes, form_of, shapes_of
from fxpipe.runtime.stage import Layout, Stage

_SHOWN_ACTIONS = 12
"""Actions at the head of a script: enough to see the first microbatch come and go."""


@dataclasses.dataclass(frozen=True)
class Example:
    """A batch to write scripts for.

    Args:
        inputs: the tensors that the model takes.
        target: what the loss compares with; None if that is not known.
    """

    inputs: Sequence[Tensor]
    target: Any


def emit(
    compiled: Compiled,
    plan: Plan,
    folder: Path,
    *,
    options: CompileOptions,
    ranks: Collection[int],
    example: Example | None = None,
    unroll: bool = False,
) -> Path:
    """Writes ``run.py``, and ``rank_<r>.py`` and ``rank_<r>.pt`` for each rank.

    Args:
        compiled: the model.
        plan: its order of work.
        folder: made if it is not there.
        options: what the user asked for.
        ranks: whose files are written: those of this process. Rank 0 writes what all share.
        example: saved as ``batch.pt``. None: the scripts are for microbatches like the one that the
            model was traced with.
        unroll: the order without loops, one line an action.

    Returns:
        Path of ``run.py``.

    Raises:
        FxpipeError: the model, its state or the loss cannot be written down.
    """
    scripts = Scripts(compiled, plan, options, example, unroll=unroll)
    folder.mkdir(parents=True, exist_ok=True)
    for rank in ranks:
        code = scripts.rank_code(rank)
        save_state(folder / f"rank_{rank}.pt", scripts.trees(rank), scripts.loss_module(rank))
        (folder / f"rank_{rank}.py").write_text(code, encoding="utf-8")
    if 0 in ranks:
        (folder / "run.py").write_text(scripts.run_code(), encoding="utf-8")
        if example is not None:
            torch.save((list(example.inputs), example.target), folder / "batch.pt")
    return folder / "run.py"


def rank_code(
    compiled: Compiled,
    plan: Plan,
    rank: int,
    *,
    options: CompileOptions,
    example: Example | None = None,
    unroll: bool = False,
) -> str:
    """The script of one rank, as `emit` writes it."""
    return Scripts(compiled, plan, options, example, unroll=unroll).rank_code(rank)


class Scripts:
    """The text of all scripts of a pipeline, and the modules that go with them.

    Args:
        compiled: the model.
        plan: its order of work.
        options: what the user asked for.
        example: the batch that the scripts are for.
        unroll: the order without loops.
    """

    def __init__(
        self,
        compiled: Compiled,
        plan: Plan,
        options: CompileOptions,
        example: Example | None,
        *,
        unroll: bool,
    ) -> None:
        self._compiled, self._plan, self._options = compiled, plan, options
        self._example, self._unroll = example, unroll
        has_target = example is not None and example.target is not None
        self._has_loss = plan.schedule.has_backward or (options.loss is not None and has_target)

    def trees(self, rank: int) -> dict[int, nn.Module]:
        """The module of each stage of a rank, as its functions see it."""
        return {s: module_tree(self._compiled.stages[s].module) for s in self._stages_of(rank)}

    def loss_module(self, rank: int) -> nn.Module | None:
        """What the loss calls ``self``, on the rank that computes it."""
        loss = self._loss_on(rank)
        return None if loss is None else loss.module

    def rank_code(self, rank: int) -> str:
        """The script of a rank."""
        schedule, program = self._plan.schedule, self._plan.program[rank]
        stages = [self._compiled.stages[s] for s in self._stages_of(rank)]
        functions = [self._functions[stage.index] for stage in stages]
        if loss := self._loss_on(rank):
            functions.append(loss.function)
            stages[-1] = dataclasses.replace(stages[-1], has_loss=True)
        return _render(
            "rank.py.jinja",
            **self._shared,
            rank=rank,
            stages={stage.index: _wires(stage) for stage in stages},
            functions={function.name: function.text for function in functions},
            imports=merge_imports(functions),
            step=step_lines(program, unroll=self._unroll),
            first_actions=" ".join(map(str, program[:_SHOWN_ACTIONS])),
            num_actions=len(program),
            shown_actions=_SHOWN_ACTIONS,
            schedule=schedule,
            layouts={shapes: piece.layout for shapes, piece in self._pieces.items()},
            emission=self._emission,
            routes=self._plan.routes,
            inputs=self._compiled.batch_dims,
            outputs=tuple(self._compiled.traced.output.names("output")),
            output_dims=self._output_dims,
            target=self._target_form,
            loss_reduction=self._options.loss_reduction,
            tied=self._compiled.tied,
            names=other_names(self.trees(rank), self._compiled.graph),
        )

    def run_code(self) -> str:
        """The script that is started."""
        shown = self._example.inputs if self._example else next(iter(self._pieces.values())).inputs
        paths = [p.path for p in self._compiled.traced.inputs.placeholders]
        return _render(
            "run.py.jinja",
            **self._shared,
            inputs_shown=[(path, format_type(t)) for path, t in zip(paths, shown, strict=True)],
            is_batch=self._example is not None,
            trains=self._plan.schedule.has_backward,
        )

    @property
    def _shared(self) -> dict[str, Any]:
        """What the head of every script names."""
        return {
            "model": self._compiled.name,
            "ranks": self._plan.schedule.ranks,
            "microbatches": self._plan.schedule.microbatches,
            "has_loss": self._has_loss,
            "fxpipe_version": _fxpipe_version(),
            "torch_version": torch.__version__,
        }

    def _stages_of(self, rank: int) -> list[int]:
        return [s for s, r in enumerate(self._plan.schedule.placement) if r == rank]

    @functools.cached_property
    def _pieces(self) -> dict[Shapes, _Piece]:
        """A microbatch of each shape there is."""
        if self._example is None:
            inputs = self._compiled.traced.inputs.example.tensors
            return {shapes_of(inputs): _Piece(inputs, None, self._compiled.probe.layout(inputs))}
        batch, count = self._example.inputs, self._plan.schedule.microbatches
        dims = self._compiled.batch_dims
        targets = split_target(self._example.target, dims.rows(batch), count)
        found: dict[Shapes, _Piece] = {}
        for inputs, target in zip(dims.split(batch, count), targets, strict=True):
            if (shapes := shapes_of(inputs)) not in found:
                found[shapes] = _Piece(inputs, target, self._compiled.probe.layout(inputs))
        return found

    @property
    def _output_dims(self) -> tuple[int | None, ...]:
        """Dimension of the rows of each leaf of the output; empty if it is 0 for all."""
        inputs = next(iter(self._pieces.values())).inputs
        dims = self._compiled.probe.output_dims(inputs, self._compiled.batch_dims.dims)
        return dims if any(dim != 0 for dim in dims) else ()

    @property
    def _target_form(self) -> str | None:
        """What the target is to be like: on every rank, since each of them is to refuse another."""
        if self._example is None or self._example.target is None:
            return None
        return form_of(self._example.target)

    def _loss_on(self, rank: int) -> LossCode | None:
        return self._loss if self._has_loss and rank == self._plan.schedule.placement[-1] else None

    @functools.cached_property
    def _loss(self) -> LossCode:
        return loss_code(
            self._options.loss or output_is_loss,
            self._compiled.traced,
            [piece.inputs for piece in self._pieces.values()],
            [piece.target for piece in self._pieces.values()],
        )

    @functools.cached_property
    def _functions(self) -> list[FunctionCode]:
        graphs = self._compiled.stage_graphs
        return [function_code(g.module.graph, f"stage_{g.index}") for g in graphs]

    @functools.cached_property
    def _emission(self) -> str:
        """A digest of what the scripts have to agree on."""
        layouts = [literal(piece.layout) for piece in self._pieces.values()]
        text = repr((self._functions, layouts, self._plan.program, self._compiled.tied))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A microbatch to write scripts for; its target is None if that is not known."""

    inputs: Sequence[Tensor]
    target: Any
    layout: Layout


def _fxpipe_version() -> str:
    # the package names, for type checkers, what stands on the floors above
    return str(importlib.import_module("fxpipe").__version__)


def _wires(stage: Stage) -> dict[str, Any]:
    """What leads in and out of a stage: the fields that the script does not have by other means."""
    fields = {field.name: field.default for field in dataclasses.fields(stage)}
    shown = [name for name in fields if name not in ("index", "module", "origins")]
    return {n: value for n in shown if (value := getattr(stage, n)) != fields[n]}


def _render(template: str, **values: Any) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["literal"] = literal
    return environment.get_template(template).render(values)

"""What can be seen of a compiled pipeline: graphs, programs, plan, report and scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import fx

from fxpipe.builder import Builder
from fxpipe.compiler import Compiled
from fxpipe.errors import OptionError
from fxpipe.manager import Step
from fxpipe.options import CompileOptions
from fxpipe.plan import Plan, make_plan
from fxpipe.runtime.driver import Driver
from fxpipe.schedule import Action, Timeline

if TYPE_CHECKING:
    from fxpipe.emit.script import Example


class Inspection:
    """The half of a `Pipeline` that shows what was compiled and runs nothing."""

    options: CompileOptions
    _builder: Builder
    _driver: Driver

    @property
    def compiled(self) -> bool:
        """Whether the model has been traced and cut."""
        return self._builder.first is not None

    @property
    def steps(self) -> tuple[Step, ...]:
        """What each pass did to the graph: its text before and after."""
        return self._builder.require_first().steps

    def graph(self, stage: int) -> fx.GraphModule:
        """The graph of one stage, with its send and recv nodes."""
        self._check_index("stage", stage, self.options.stages)
        return self._builder.require_first().stage_graphs[stage].module

    def output_dims(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int | None, ...]:
        """Along which dimension the microbatches of a batch join, for each leaf of its output.

        Returns:
            None for a leaf without rows, which is as the first microbatch gives it.
        """
        bound = self._builder.binder.bind(args, kwargs)
        compiled, _ = self._builder.variant(bound, tuple(args), kwargs)
        dims = compiled.batch_dims
        piece = dims.split(bound.tensors, self._builder.microbatches(dims.rows(bound.tensors)))[0]
        return compiled.probe.output_dims(piece, dims.dims)

    def program(self, rank: int) -> tuple[Action, ...]:
        """The actions of one rank, transfers included."""
        self._check_index("rank", rank, self.options.ranks)
        return self.plan.program[rank]

    def code(
        self,
        rank: int,
        *,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        target: Any = None,
        unroll: bool = False,
    ) -> str:
        """The script of one rank, as `emit` writes it for the same arguments."""
        from fxpipe.emit.script import rank_code

        self._check_index("rank", rank, self.options.ranks)
        compiled, plan, example = self._to_emit(args, kwargs, target)
        return rank_code(compiled, plan, rank, options=self.options, example=example, unroll=unroll)

    @property
    def plan(self) -> Plan:
        """What was decided: cuts, schedule, costs and transfers of every stage."""
        compiled, count = self._builder.require_first(), self._builder.first_microbatches
        return make_plan(compiled, self.options, count, training=self._builder.first_training)

    def report(self) -> str:
        """The plan as text."""
        return self.plan.report()

    def simulate(self) -> Timeline:
        """One step as predicted from the estimated costs of the stages."""
        return self.plan.simulate()

    def emit(
        self,
        folder: str | Path,
        *,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        target: Any = None,
        unroll: bool = False,
    ) -> Path:
        """Writes scripts that run the pipeline without the compiler, and the state they start from.

        Under torchrun each rank calls it and writes its own files.

        Args:
            folder: made if it is not there.
            args: positional inputs of a batch, which is saved with the scripts. None, as `kwargs`:
                no batch is saved, and the scripts are for microbatches like the one that was
                traced.
            kwargs: its keyword inputs.
            target: what the loss compares with. The loss is traced with it; without one it is
                imported by the script, if it has to be.
            unroll: the order of actions without loops, one line an action.

        Returns:
            Path of ``run.py``, to be started by ``torchrun --nproc-per-node <ranks>``.

        Raises:
            FxpipeError: the model or its loss cannot be written down, or nothing is compiled yet
                and no batch is given.
        """
        from fxpipe.emit.script import emit

        compiled, plan, example = self._to_emit(args, kwargs, target)
        return emit(
            compiled,
            plan,
            Path(folder),
            options=self.options,
            ranks=self._driver.ranks,
            example=example,
            unroll=unroll,
        )

    def _to_emit(
        self, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None, target: Any
    ) -> tuple[Compiled, Plan, Example | None]:
        """What scripts for this batch are made of; of the first batch if none is given."""
        from fxpipe.emit.script import Example

        if args is None and kwargs is None:
            if target is not None:
                raise OptionError("a target is given without its batch", hint="pass args= too")
            return self._builder.require_first(), self.plan, None
        given, named = tuple(args or ()), dict(kwargs or {})
        bound = self._builder.binder.bind(given, named)
        compiled, _ = self._builder.variant(bound, given, named)
        count = self._builder.microbatches(compiled.batch_dims.rows(bound.tensors))
        plan = make_plan(compiled, self.options, count, training=self._builder.training[""])
        return compiled, plan, Example(bound.tensors, target)

    def _check_index(self, what: str, index: int, count: int) -> None:
        if not 0 <= index < count:
            raise OptionError(f"there is no {what} {index}", hint=f"{what}s are 0 to {count - 1}")

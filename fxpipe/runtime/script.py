"""What emitted scripts run on: binds the stage functions of a folder to the executor.

A script of a rank defines the function of each of its stages, ``step(p)``, which is the order of
its actions, and ``SCRIPT``, a `Script`. Beside it lies a file with its modules. ``run.py`` calls
`load`. Nothing here imports the compiler.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxpipe import compat
from fxpipe.errors import InputError
from fxpipe.runtime.driver import Driver, make_driver
from fxpipe.runtime.engine import Engine
from fxpipe.runtime.executor import Executor
from fxpipe.runtime.microbatches import BatchDims
from fxpipe.runtime.script_engine import ScriptEngine
from fxpipe.runtime.script_tables import Script, form_of
from fxpipe.runtime.stage import (
    Layout,
    OutputGradient,
    Receive,
    Send,
    Stage,
    TensorLayout,
    TiedLink,
)
from fxpipe.runtime.stepper import LossPlace, Stepper, links_of
from fxpipe.runtime.tied import TiedGradients, TiedParameter, find_tied
from fxpipe.schedule import Action, Kind, Routes, verify

# what a script of a rank names, and run.py
__all__ = [
    "BatchDims",
    "Layout",
    "OutputGradient",
    "Receive",
    "Routes",
    "Script",
    "ScriptPipeline",
    "Send",
    "Stage",
    "TensorLayout",
    "TiedLink",
    "load",
]


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What one step gives back.

    Args:
        loss: 0-dim, detached, on every rank; None where no loss is computed.
        output: the leaves of the output of the whole batch, detached, by name, on the rank that
            holds the last stage; None elsewhere.
    """

    loss: Tensor | None
    output: dict[str, Any] | None


class ScriptPipeline:
    """The ranks of this process, bound to the other ranks and to their executors.

    Args:
        scripts: those of the ranks of this process, ascending.
        modules: the module of each of their stages.
        loss_modules: what the loss of each rank holds; None if nothing.
        driver: has joined the other ranks.
        leave: called at the end.
    """

    def __init__(
        self,
        scripts: Sequence[Script],
        modules: Mapping[int, nn.Module],
        loss_modules: Mapping[int, nn.Module | None],
        driver: Driver,
        leave: Callable[[], None] | None = None,
    ) -> None:
        first = self._script = scripts[0]
        self.ranks, self.device = driver.ranks, driver.device
        self._driver, self._modules, self._leave = driver, modules, leave
        programs = {script.rank: script.program for script in scripts}
        has_backward = _check_together(scripts, programs, driver)
        self._parameters = _share_tied(scripts, modules)
        stages = {script.rank: script.stages(modules) for script in scripts}
        chained = {link.name for own in stages.values() for stage in own for link in stage.tied}
        tied = find_tied(first.tied, modules, first.placement, self._parameters, chained)
        driver.connect(links_of(first.routes, first.placement))
        executors = [
            Executor(
                programs[script.rank],
                stages={stage.index: stage for stage in stages[script.rank]},
                engines=_engines(
                    script,
                    stages[script.rank],
                    loss_modules[script.rank],
                    tied,
                    has_backward=has_backward,
                ),
                placement=first.placement,
                transport=driver.transport(script.rank),
                device=driver.device,
                microbatches=first.microbatches,
            )
            for script in scripts
        ]
        self._stepper = Stepper(
            driver,
            executors,
            TiedGradients(tied if has_backward else (), driver.collectives),
            inputs=first.inputs,
            microbatches=first.microbatches,
            last_rank=first.placement[-1],
            loss=LossPlace.INSIDE if first.has_loss else LossPlace.NOWHERE,
            loss_reduction=first.loss_reduction,
            layout_of=first.layout_of,
            output_dims=lambda _: first.output_dims,
        )

    def step(self, *inputs: Tensor, target: Any = None) -> StepResult:
        """Runs one batch forward, and backward if the scripts were written in train mode.

        Args:
            inputs: the tensors that the model takes, whole batches, in the order of the scripts.
            target: what the loss compares with, cut along dimension 0.

        Returns:
            The loss on every rank; the output, by the path of each leaf, on that of the last stage.

        Raises:
            InputError: the scripts were not written for such a batch.
            RankError: a rank failed; every rank raises it with the same cause.
        """
        names, form = self._script.inputs.names, self._script.target
        if len(inputs) != len(names):
            raise InputError(
                f"{len(inputs)} inputs are given, and the model takes {len(names)}",
                at=f"inputs: {', '.join(names)}",
            )
        if form is not None and form_of(target) != form:
            raise InputError(
                f"the target is {form_of(target)}, and the loss was traced for {form}",
                hint="emit again with a target like this one",
            )
        loss, leaves = self._stepper.run(inputs, target)
        names = self._script.outputs
        return StepResult(loss, None if leaves is None else dict(zip(names, leaves, strict=True)))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of these ranks under their original names, a tied one under its first."""
        yield from self._parameters.items()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of these ranks, each once."""
        yield from self._parameters.values()

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers of these ranks under their original names."""
        for module in self._modules.values():
            yield from module.named_buffers()

    def close(self) -> None:
        """Ends the pipeline once every rank has come here; each of them calls it."""
        self._driver.collectives.gather(dict.fromkeys(self.ranks))
        for rank in self.ranks:
            self._driver.transport(rank).close()
        if self._leave is not None:
            self._leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *rest: object) -> None:
        if error is None:
            self.close()


def _engines(
    script: Script,
    stages: Sequence[Stage],
    loss_module: nn.Module | None,
    tied: Sequence[TiedParameter],
    *,
    has_backward: bool,
) -> dict[int, Engine]:
    """One engine a stage of a rank."""
    held = {parameter.name: parameter.held for parameter in tied}
    loss = script.loss and functools.partial(script.loss, loss_module)
    return {
        stage.index: ScriptEngine(
            stage,
            script.functions[stage.index],
            loss if stage.has_loss else None,
            has_backward=has_backward,
            tied=[held[link.name][stage.index] for link in stage.tied],
        )
        for stage in stages
    }


def _check_together(
    scripts: Sequence[Script], programs: Mapping[int, tuple[Action, ...]], driver: Driver
) -> bool:
    """Checks the scripts of all ranks against each other; says whether they run backward."""
    here = {script.rank: (script.emission, programs[script.rank]) for script in scripts}
    emissions, program = zip(*driver.collectives.gather(here), strict=True)
    strangers = [r for r, emission in enumerate(emissions) if emission != emissions[0]]
    if strangers:
        raise InputError(
            f"the scripts of rank 0 and of ranks {', '.join(map(str, strangers))} "
            "were not written together",
            hint="emit them all again, and copy them all",
        )
    has_backward = any(action.kind in (Kind.B, Kind.I) for order in program for action in order)
    verify(
        program,
        placement=scripts[0].placement,
        routes=scripts[0].routes,
        microbatches=scripts[0].microbatches,
        forward_only=not has_backward,
    )
    return has_backward


def _share_tied(
    scripts: Sequence[Script], modules: Mapping[int, nn.Module]
) -> dict[str, nn.Parameter]:
    """The parameters by first name; stages of this process that tie one get the same object."""
    names = {name: first for script in scripts for name, first in script.names.items()}
    found: dict[str, nn.Parameter] = {}
    for module in modules.values():
        for name, parameter in list(module.named_parameters()):
            shared = found.setdefault(names.get(name, name), parameter)
            if shared is not parameter:
                for holder in module.modules():
                    compat.replace_state(holder, parameter, shared)
    return found


def load(folder: str | Path, ranks: int) -> ScriptPipeline:
    """Joins the other ranks and reads this rank's script; without torchrun, those of all ranks.

    Args:
        folder: holds ``rank_<r>.py`` and ``rank_<r>.pt``, which is a pickle.
        ranks: P.

    Raises:
        OptionError: torchrun has started another number of processes.
        InputError: the scripts were not written together.
        ScheduleError: a script was changed, and its order deadlocks or is not complete.
    """
    was_initialized = dist.is_initialized()
    driver = make_driver("auto", ranks, None, torch.device("cpu"))
    made_group = dist.is_initialized() and not was_initialized
    scripts: list[Script] = []
    modules: dict[int, nn.Module] = {}
    losses: dict[int, nn.Module | None] = {}
    with driver.together():
        for rank in driver.ranks:
            path = Path(folder, f"rank_{rank}.py")
            scripts.append(_run_file(path).SCRIPT)
            saved = path.with_suffix(".pt")
            state = torch.load(saved, map_location=driver.device, weights_only=False)
            modules |= state["stages"]
            losses[rank] = state["loss"]
    leave = dist.destroy_process_group if made_group else None
    return ScriptPipeline(scripts, modules, losses, driver, leave)


def _run_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None  # it ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

"""The options of ``compile``: one frozen value, checked when it is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from fxpipe.errors import OptionError

ENGINES = ("autograd",)
ACTIVATION_CHECKPOINTS = ("never",)
TRANSPORTS = ("auto", "local", "gloo", "nccl")
REDUCTIONS = ("mean", "sum")
OUTPUTS = ("last", "all")
BALANCES = ("time", "parameters")

Init: TypeAlias = Callable[[str, Tensor], Any]
"""``init(name, tensor)`` fills a parameter or buffer in place."""

WeightSource: TypeAlias = Mapping[str, Tensor] | str | Path
"""A state dict, or the path of one: ``.safetensors``, its ``.index.json``, or what torch saved."""

Loss = Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class CompileOptions:
    """What the user asked for.

    Args:
        stages: S, the contiguous parts of the model; S >= 1.
        loss: ``loss(output, target)`` -> 0-dim tensor. None: the output is the loss, or has one
            under the name ``loss``.
        microbatches: M; None: 4 * stages, never more than the rows of the batch.
        schedule: name of a schedule.
        chunks: V, stages a rank holds.
        cuts: names of modules or nodes at which a new stage starts; None: balanced.
        balance: what balanced cuts even out, ``"time"`` or ``"parameters"``.
        batch_dims: parameter name of ``forward`` -> dimension along which microbatches are cut,
            None = every microbatch gets it whole. Not named: dimension 0.
        loss_reduction: ``"mean"``: the loss of a batch is the row-weighted mean of the microbatch
            losses; ``"sum"``: their sum.
        outputs: which ranks get the output of a step: ``"last"``, those that hold the last stage,
            or ``"all"``.
        engine: how a stage runs backward.
        activation_checkpoint: which activations are recomputed in backward.
        transport: how tensors travel. ``"auto"``: between processes under torchrun, else within
            this one.
        weights: values of a model on the meta device: a state dict or its path.
        init: ``init(name, tensor)`` fills, in place, what `weights` does not have.
        verify: compare the stages with the plain model on the batch it is compiled with; None: if
            the model is small.
        leaf_modules: modules kept whole by the trace, as FQNs or classes.

    Raises:
        OptionError: a value that cannot work, whatever the model.
    """

    stages: int
    loss: Loss | None = None
    microbatches: int | None = None
    schedule: str = "1F1B"
    chunks: int = 1
    cuts: tuple[str, ...] | None = None
    balance: str = "time"
    batch_dims: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    loss_reduction: str = "mean"
    outputs: str = "last"
    engine: str = "autograd"
    activation_checkpoint: str = "never"
    transport: str = "auto"
    weights: WeightSource | None = None
    init: Init | None = None
    verify: bool | None = None
    leaf_modules: tuple[str | type, ...] = ()

    def __post_init__(self) -> None:
        _whole("stages", self.stages)
        _whole("chunks", self.chunks)
        if self.microbatches is not None:
            _whole("microbatches", self.microbatches)
        if self.stages % self.chunks:
            raise OptionError(
                f"{self.stages} stages cannot be dealt out {self.chunks} a rank",
                at=f"stages={self.stages}, chunks={self.chunks}",
                hint="make stages a multiple of chunks",
            )
        _one_of("engine", self.engine, ENGINES)
        _one_of("activation_checkpoint", self.activation_checkpoint, ACTIVATION_CHECKPOINTS)
        _one_of("transport", self.transport, TRANSPORTS)
        _one_of("outputs", self.outputs, OUTPUTS)
        _one_of("loss_reduction", self.loss_reduction, REDUCTIONS)
        _one_of("balance", self.balance, BALANCES)
        if self.loss is not None and not callable(self.loss):
            raise OptionError(
                f"loss is a {type(self.loss).__name__}, not a function",
                at=f"loss={self.loss!r}",
                hint="pass loss(output, target) -> 0-dim tensor",
            )
        if self.cuts is not None and len(self.cuts) != self.stages - 1:
            raise OptionError(
                f"{self.stages} stages need {self.stages - 1} cuts, {len(self.cuts)} are given",
                at=f"stages={self.stages}, cuts={self.cuts}",
                hint=f"use stages={len(self.cuts) + 1}",
            )

    @property
    def ranks(self) -> int:
        """P, how many ranks the stages are dealt out to."""
        return self.stages // self.chunks

    @property
    def wanted_microbatches(self) -> int:
        """M, before the batch is seen."""
        return 4 * self.stages if self.microbatches is None else self.microbatches


def _whole(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise OptionError(
            f"{name} is {value!r}, not a whole number of at least 1", at=f"{name}={value!r}"
        )


def _one_of(name: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise OptionError(
            f"unknown {name} {value!r}", at=f"{name}={value!r}", hint=f"known: {', '.join(known)}"
        )

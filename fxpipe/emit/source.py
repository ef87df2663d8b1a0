"""What the emitter reads of a compiled model and its plan, which are made on a floor above."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor, fx

from fxpipe.runtime.microbatches import BatchDims
from fxpipe.runtime.stage import Layout, Stage
from fxpipe.schedule import Program, Routes, Schedule
from fxpipe.split import StageGraph
from fxpipe.trace import Traced


class Probe(Protocol):
    """Finds the layout of a microbatch, and where the rows of the output are."""

    def layout(self, inputs: Sequence[Tensor]) -> Layout: ...
    def output_dims(
        self, inputs: Sequence[Tensor], rows: Sequence[int | None]
    ) -> tuple[int | None, ...]: ...


class Compiled(Protocol):
    """A model in one mode, cut into stages."""

    @property
    def name(self) -> str: ...
    @property
    def traced(self) -> Traced: ...
    @property
    def graph(self) -> fx.GraphModule: ...
    @property
    def stage_graphs(self) -> Sequence[StageGraph]: ...
    @property
    def stages(self) -> Sequence[Stage]: ...
    @property
    def probe(self) -> Probe: ...
    @property
    def batch_dims(self) -> BatchDims: ...
    @property
    def tied(self) -> Mapping[str, tuple[int, ...]]: ...


class Plan(Protocol):
    """The order of each rank."""

    @property
    def schedule(self) -> Schedule: ...
    @property
    def program(self) -> Program: ...
    @property
    def routes(self) -> Routes: ...

"""The shape of a pass, and the manager that runs and checks a list of them."""

from __future__ import annotations

import copy
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable
from typing import ClassVar

from torch import fx

from fxpipe import log as dumps
from fxpipe.errors import FxpipeError, PassError
from fxpipe.ir.text import format_graph

log = logging.getLogger(__name__)

Check = Callable[[fx.GraphModule], None]


@dataclasses.dataclass(frozen=True)
class Pass:
    """A named rewrite of one graph. Options are the fields of the frozen dataclass."""

    name: ClassVar[str]
    requires: ClassVar[tuple[Check, ...]] = ()
    ensures: ClassVar[tuple[Check, ...]] = ()

    def run(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Rewrites `gm` and returns it. `gm` is the manager's copy: mutate it freely."""
        raise TypeError(f"{type(self).__name__} is a pass without a body")

    def __str__(self) -> str:
        options = ",".join(f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self))
        return f"{self.name}{{{options}}}" if options else self.name


@dataclasses.dataclass(frozen=True)
class Step:
    """What one pass did: its text before and after."""

    spec: str
    before: str
    after: str

    @property
    def modified(self) -> bool:
        return self.before != self.after


def run_passes(gm: fx.GraphModule, passes: Iterable[Pass]) -> tuple[fx.GraphModule, list[Step]]:
    """Runs `passes` in order on a copy of `gm`; the caller's module is never touched.

    Raises:
        PassError: a pass, or a check before or after it, failed; the cause is chained.
    """
    gm = share_parameters(gm, copy.deepcopy(gm.graph))
    steps: list[Step] = []
    after = format_graph(gm)
    for p in passes:
        before, start = after, time.perf_counter()
        try:
            for check in p.requires:
                check(gm)
            gm = p.run(gm)
            gm.graph.lint()
            for check in p.ensures:  # on the result: torch's PassBase checks the input module
                check(gm)
        except FxpipeError as error:
            done = " -> ".join(s.spec for s in steps) or "(none)"
            raise PassError(
                f"pass {p} failed: {error.problem}",
                at=error.at,
                hint=error.hint or f"passes before it: {done}",
            ) from error
        gm.recompile()
        after = format_graph(gm)
        steps.append(Step(str(p), before, after))
        dumps.dump(f"{len(steps):02}-{p.name}.txt", after)
        log.debug(
            "pass=%s modified=%s ms=%.1f",
            p.name,
            steps[-1].modified,
            1e3 * (time.perf_counter() - start),
        )
    return gm, steps


def share_parameters(gm: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """A GraphModule of `graph` that shares parameters, buffers and submodules with `gm`."""
    shared = fx.GraphModule(gm, graph, class_name=type(gm).__name__)
    shared.meta = dict(gm.meta)
    return shared

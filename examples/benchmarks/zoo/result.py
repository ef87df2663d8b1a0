"""What became of one model: a line of JSON, and a row of a table."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tabulate import tabulate

EQUAL, DIFFERS, COMPILED, FAILED = "bit-equal", "differs", "compiled", "failed"
OUTCOMES = (EQUAL, DIFFERS, COMPILED, FAILED)


@dataclasses.dataclass
class Result:
    """What became of one model; what it did not get to is None.

    Args:
        family: as of its entry.
        name: as of its entry.
        outcome: one of `OUTCOMES`; ``compiled``: it was too large to run.
        parameters: number of elements.
        front_end: what captured it.
        why: why no better front end did.
        nodes: of all stages, transfers included.
        edges: values that go from one stage to another.
        compile_s: seconds to trace, cut and schedule it.
        step_s: seconds of the first step.
        difference: largest absolute difference between the pipelined and the plain run.
        where: the value that differs by it, and how many do.
        error: class and text of what it failed with.
        traceback: where it came from.
    """

    family: str
    name: str
    outcome: str = FAILED
    parameters: int | None = None
    front_end: str | None = None
    why: str = ""
    nodes: int | None = None
    edges: int | None = None
    compile_s: float | None = None
    step_s: float | None = None
    difference: float | None = None
    where: str = ""
    error: str = ""
    traceback: str = ""

    @property
    def verdict(self) -> str:
        """The outcome in one line: the difference, or the problem, the place and the way out."""
        if self.outcome == FAILED:
            lines = [line.strip() for line in self.error.splitlines() if line.strip()]
            marked = [line for line in lines[1:] if line.startswith(("at:", "hint:"))]
            # a file of a library is told by its package
            return re.sub(r"\S*/site-packages/", "", "; ".join([*lines[:1], *marked]))
        if self.outcome == DIFFERS:
            return f"{self.difference:.1e} in {self.where}"
        return self.outcome


def read(path: Path) -> dict[tuple[str, str], Result]:
    """The latest result of every model in a file of JSON lines; empty if there is no file."""
    if not path.exists():
        return {}
    results = (Result(**json.loads(line)) for line in path.read_text().splitlines())
    return {(r.family, r.name): r for r in results}


def append(path: Path, result: Result) -> None:
    with path.open("a") as file:
        file.write(json.dumps(dataclasses.asdict(result)) + "\n")


def table(results: Sequence[Result]) -> str:
    """Every model, and totals by family, as markdown."""
    return f"{_models(results)}\n\n{_totals(results)}\n"


def _models(results: Iterable[Result]) -> str:
    rows = [
        {
            "family": r.family,
            "model": r.name,
            "M parameters": _shown(r.parameters and r.parameters / 1e6, 2),
            "front end": f"{r.front_end or ''}{r.why and f': {r.why}'}",
            "nodes": _shown(r.nodes),
            "edges": _shown(r.edges),
            "compile s": _shown(r.compile_s, 1),
            "step s": _shown(r.step_s, 2),
            "result": r.verdict.replace("|", "\\|"),
        }
        for r in results
    ]
    return tabulate(rows, headers="keys", tablefmt="pipe", disable_numparse=True)


def _totals(results: Iterable[Result]) -> str:
    counts: dict[str, Counter[str]] = {}
    for r in results:
        counts.setdefault(r.family, Counter())[r.outcome] += 1
    counts["all"] = sum(counts.values(), Counter())
    rows = [{"family": family, **_row(count)} for family, count in counts.items()]
    return tabulate(rows, headers="keys", tablefmt="pipe")


def _row(count: Mapping[str, int]) -> dict[str, int]:
    return {"models": sum(count.values()), **{outcome: count[outcome] for outcome in OUTCOMES}}


def _shown(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:.{digits}f}"

"""How the first error of any rank becomes the error of every rank.

The rank that fails writes its report to the `Board`, and only then breaks its connections. A peer
that waits for it is released at once, finds the report, breaks its own connections and raises the
report's error; so the error also reaches ranks that never talk to the first one. A peer that finds
no report has lost a process that could not write one, and reports that. Nobody has to wait for a
report that may yet come, since it is always there before a connection breaks.

A rank that computes learns of the error at its next transfer.
"""

from __future__ import annotations

import dataclasses
import json
import os
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

import torch
from torch.distributed.distributed_c10d import Store

from fxpipe.errors import FxpipeError, RankError, TransportError
from fxpipe.runtime.transport.interface import Transport, first_line

_PHASES: Final = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}
_NOT_THE_USERS: Final = (
    f"{Path(torch.__file__).parent}{os.sep}",
    f"{Path(__file__).parents[1]}{os.sep}",
    "<",  # generated code
)


class Board:
    """Where the ranks of one pipeline post the first error.

    Args:
        store: seen by all of them, and by no other pipeline.
    """

    _KEY: Final = "first-error"

    def __init__(self, store: Store) -> None:
        # A connection of its own: a thread that waits for a key holds the one it waits on.
        self._store = store.clone()

    def report(self, text: str) -> str:
        """Posts `text` if nothing is posted yet; returns what is."""
        try:
            return self._store.compare_set(self._KEY, "", text).decode()
        except RuntimeError:  # the process that hosts the store is gone
            return text

    def first(self) -> str | None:
        """What is posted, if anything is."""
        try:
            return self._store.get(self._KEY).decode() if self._store.check([self._KEY]) else None
        except RuntimeError:
            return None


def explain(
    error: BaseException,
    *,
    rank: int,
    action: str = "",
    stage: int | None = None,
    microbatch: int | None = None,
    module: str = "",
    source: str = "",
) -> RankError:
    """Says what failed, and where.

    Args:
        error: what was raised.
        rank: in the world, as launchers print it.
        action: as text, ``2F3``; empty outside of the program.
        stage: None where the error is not one of a stage.
        microbatch: None where the error is not one of a microbatch.
        module: name and class, ``blocks.7.attn (Attention)``.
        source: the user's own source line; taken from the traceback if empty.
    """
    place = [
        action,
        "" if stage is None else f"stage {stage}",
        "" if microbatch is None else f"microbatch {microbatch}",
        f"module {module}" if module else "",
        _PHASES.get(action.strip("0123456789"), ""),
        source or _users_line(error),
    ]
    if isinstance(error, FxpipeError):
        problem, hint = error.problem, error.hint
        place.append(error.at)
    else:
        problem, hint = first_line(error), ""
    return RankError(
        f"rank {rank}: {type(error).__name__}" + (f": {problem}" if problem else ""),
        at=", ".join(part for part in place if part),
        hint=hint,
    )


def fail(
    error: BaseException,
    told: RankError,
    *,
    transport: Transport,
    board: Board | None = None,
    ranks: Sequence[int] = (),
) -> NoReturn:
    """Ends this rank with the first error of the pipeline, and makes its peers do the same.

    Args:
        error: caught on this rank; chained unless it only says that another rank failed.
        told: `error`, explained.
        transport: aborted.
        board: None where all ranks are in this process.
        ranks: rank in the world of each rank of the pipeline; empty where they are the same.

    Raises:
        RankError: the first error of any rank.
    """
    here = ranks[transport.rank] if ranks else transport.rank
    first = mine = _Report.of(told, here, error)
    if board is not None:
        if isinstance(error, TransportError):
            posted = board.first()
            lost = () if posted else transport.lost()
            if lost:
                mine = _loss([ranks[r] if ranks else r for r in lost], here, told.at)
            first = _Report.parse(posted or board.report(str(mine)))
        else:
            first = _Report.parse(board.report(str(mine)))
    transport.abort()
    if not isinstance(error, Exception):
        raise error  # an interrupt stays one
    if first.problem == told.problem:
        raise told from error
    raise first.as_error() from (None if isinstance(error, TransportError) else error)


def report_loss(board: Board, lost: Sequence[int], *, seen_by: int) -> None:
    """Posts that processes of other ranks are gone, all ranks named as in the world."""
    board.report(str(_loss(lost, seen_by, "")))


def _loss(lost: Sequence[int], seen_by: int, waited_at: str) -> _Report:
    names = ", ".join(map(str, lost))
    who, whose = ("rank", "its process is") if len(lost) == 1 else ("ranks", "their processes are")
    return _Report(
        seen_by,
        f"{who} {names}: {whose} gone and left no report",
        f"seen by rank {seen_by}" + (f", which waited at {waited_at}" if waited_at else ""),
        "the launcher's log says how it ended: -9 is a kill, often for lack of memory",
    )


@dataclasses.dataclass(frozen=True)
class _Report:
    """An error on its way to other processes."""

    rank: int
    problem: str
    at: str
    hint: str
    traceback: str = ""

    @classmethod
    def of(cls, told: RankError, rank: int, error: BaseException) -> _Report:
        text = "".join(traceback.format_exception(error))
        return cls(rank, told.problem, told.at, told.hint, text)

    @classmethod
    def parse(cls, text: str) -> _Report:
        return cls(**json.loads(text))

    def __str__(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    def as_error(self) -> RankError:
        error = RankError(self.problem, at=self.at, hint=self.hint)
        if self.traceback:
            # in the message, since it is all that most logs keep of an error
            error.args = (f"{error}\ntraceback of rank {self.rank}:\n{self.traceback}",)
        return error


def _users_line(error: BaseException) -> str:
    """File and line of the last frame that is neither torch's, nor ours, nor generated."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(_NOT_THE_USERS):
            return f"{frame.filename}:{frame.lineno}"
    return ""

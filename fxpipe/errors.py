"""Every exception fxpipe raises on purpose."""

from __future__ import annotations


class FxpipeError(Exception):
    """Base class: ``except FxpipeError`` catches what fxpipe reports and nothing else.

    Args:
        problem: one sentence, what is wrong, with the values that make it wrong.
        at: where: node, stage, rank, action, source line. Printed as ``  at: ...``.
        hint: what the reader can change. Printed as ``  hint: ...``.
    """

    def __init__(self, problem: str, *, at: str = "", hint: str = "") -> None:
        self.problem, self.at, self.hint = problem, at, hint
        lines = [problem]
        if at:
            lines.append(f"  at: {at}")
        if hint:
            lines.append(f"  hint: {hint}")
        super().__init__("\n".join(lines))


class OptionError(FxpipeError):
    """An option of ``compile``, or a combination of options, cannot work."""


class InputError(FxpipeError):
    """A batch does not fit the model or the compiled pipeline."""


class TraceError(FxpipeError):
    """The model cannot be captured as a graph."""


class PassError(FxpipeError):
    """A pass failed; the cause is chained."""


class VerifyError(FxpipeError):
    """A graph breaks an invariant."""


class ScheduleError(FxpipeError):
    """A schedule is incomplete, out of order, or deadlocks."""


class CostError(FxpipeError):
    """A node has no cost that can be computed."""


class TransportError(FxpipeError):
    """A transfer failed: a peer is gone, or a message was never sent."""


class RankError(FxpipeError):
    """A rank failed while it ran an action; raised on every rank with the first cause."""

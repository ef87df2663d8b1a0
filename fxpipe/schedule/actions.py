"""The vocabulary of a schedule: one Action is one thing one rank does."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final, NamedTuple, Self

from fxpipe.errors import ScheduleError


class Kind(StrEnum):
    """What is done, under PyTorch's names, so that its schedule listings can be read."""

    F = "F"  # forward
    B = "B"  # full backward: I and W in one action
    I = "I"  # input-grad half of backward; the zero-bubble paper calls it B
    W = "W"  # weight-grad half of backward
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"


COMPUTE: Final = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})

# What a compute action waits for and what it makes. W does neither.
RECEIVES: Final = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B, Kind.I: Kind.RECV_B}
SENDS: Final = {Kind.F: Kind.SEND_F, Kind.B: Kind.SEND_B, Kind.I: Kind.SEND_B}

# F: activations move, from a stage to later ones. B: gradients move, to earlier ones.
DIRECTION: Final = {
    **dict.fromkeys((Kind.F, Kind.SEND_F, Kind.RECV_F), Kind.F),
    **dict.fromkeys((Kind.B, Kind.I, Kind.SEND_B, Kind.RECV_B), Kind.B),
}

_TEXT = re.compile(rf"(\d+)({'|'.join(sorted(Kind, key=len, reverse=True))})(\d+)", re.ASCII)


class Action(NamedTuple):
    """One action of one stage for one microbatch.

    `str` and `parse` are inverses:

    >>> str(Action(2, Kind.SEND_F, 0))
    '2SEND_F0'
    >>> Action.parse("2F0") == Action(2, Kind.F, 0)
    True

    One transfer action stands for all the transfers of its stage, kind and microbatch: ``2RECV_F0``
    receives the inputs of ``2F0`` from every stage that sends it any, and ``1SEND_F0`` sends the
    outputs of ``1F0`` to every stage that reads one.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads one action.

        Raises:
            ScheduleError: `text` is anything else, surrounding spaces included.
        """
        if not (match := _TEXT.fullmatch(text)):
            raise ScheduleError(
                f"{text!r} is not an action",
                hint=f"write <stage><kind><microbatch>, as 2F0, with kind one of {', '.join(Kind)}",
            )
        return cls(int(match[1]), Kind(match[2]), int(match[3]))

"""The order of a rank's actions as a function of a script, rolled into loops."""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.schedule import Action, Loop, roll


def step_lines(actions: Sequence[Action], *, unroll: bool = False) -> list[str]:
    """The body of ``step(p)``, one call a line.

    >>> from fxpipe.schedule.one_f_one_b import one_f_one_b
    >>> print(*step_lines(one_f_one_b(2, 4).orders[0]), sep=chr(10))
    p.F(0, 0)
    for k in range(3):
        p.F(0, k + 1)
        p.B(0, k)
    p.B(0, 3)

    Args:
        actions: transfers included.
        unroll: one line an action, without loops.
    """
    lines: list[str] = []
    for item in actions if unroll else roll(actions):
        if isinstance(item, Loop):
            lines.append(f"for k in range({item.count}):")
            lines += [f"    {_call(a, _index(a.microbatch, item.shift))}" for a in item.body]
        else:
            lines.append(_call(item, str(item.microbatch)))
    return lines


def _call(action: Action, microbatch: str) -> str:
    return f"p.{action.kind}({action.stage}, {microbatch})"


def _index(first: int, shift: int) -> str:
    """The microbatch in turn k of a loop: first, first + shift, ..."""
    if shift < 0:
        return f"{first} - k" if shift == -1 else f"{first} - {-shift} * k"
    turn = "k" if shift == 1 else f"{shift} * k"
    return f"{turn} + {first}" if first else turn

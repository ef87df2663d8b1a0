"""The route of one cross-stage edge: who sends it, who reads it, where its gradient goes."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Route:
    """One transfer of a value, from the stage that makes it to one stage that reads it.

    The gradient goes back along the chain of readers: the last reader sends to the reader before
    it, which adds its own contributions, and so on to the producer. Autograd adds the
    contributions to a value from its latest use to its earliest, so only this order gives
    the bits of the plain model; a sum of each stage's own total rounds differently.

    Args:
        edge: index of the edge, the same on every rank; also the tag of its messages.
        source: stage that makes the value.
        target: stage that reads it.
        gradient_to: stage that gets the gradient from `target`; None if no gradient flows.
        gradient_from: edge and stage of the next reader, whose gradient `target` adds to; None if
            `target` is the last reader with a gradient.
        written: the reading stage writes the value in place, so it works on a copy.
    """

    edge: int
    source: int
    target: int
    gradient_to: int | None = None
    gradient_from: tuple[int, int] | None = None
    written: bool = False

    def __str__(self) -> str:
        text = f"stage {self.target} (edge {self.edge}"
        if self.gradient_to is not None:
            text += f", gradient to {self.gradient_to}"
        if self.written:
            text += ", copied"
        return text + ")"

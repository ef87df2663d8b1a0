"""The graphs of one model: which of them is right for a batch, and when another is needed."""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fxpipe.compiler import Compiled
from fxpipe.errors import InputError
from fxpipe.log import warn_once
from fxpipe.session import Held
from fxpipe.trace.guards import Guard

log = logging.getLogger(__name__)

MAX_GRAPHS = 8
"""Graphs kept for batches of one structure; each takes as long to make as the first."""

_CHOICES_KEPT = 256
"""Sizes of batches for which it is known which graph is theirs."""


class Variant(NamedTuple):
    """A compiled model, and what this process holds of it."""

    compiled: Compiled
    held: Held


class Variants:
    """Keeps a model's graphs by mode and structure of the inputs.

    Of one structure there are several where the model takes different ways for different sizes.
    """

    def __init__(self) -> None:
        self._by_key: defaultdict[Hashable, list[Variant]] = defaultdict(list)
        self._chosen: OrderedDict[Hashable, Variant] = OrderedDict()

    def choose(
        self,
        key: Hashable,
        batch: Sequence[Tensor],
        pieces: Callable[[Compiled], Sequence[Sequence[Tensor]]],
        make: Callable[[], Variant],
    ) -> Variant:
        """The first graph that is right for every microbatch of a batch.

        Args:
            key: mode and structure of the inputs.
            batch: the inputs.
            pieces: cuts the batch into microbatches.
            make: traces the model at the sizes of the first microbatch.

        Raises:
            InputError: no graph is right for all microbatches.
        """
        sizes = (key, *((tuple(t.shape), t.stride()) for t in batch))
        if sizes in self._chosen:
            self._chosen.move_to_end(sizes)
            return self._chosen[sizes]
        graphs = self._by_key[key]
        for variant in graphs:
            if _failing(variant, pieces) is None:
                break
        else:
            variant = make()
            self._keep(graphs, variant)
            if (guard := _failing(variant, pieces)) is not None:
                raise _different_graphs(guard, pieces(variant.compiled))
        self._chosen[sizes] = variant
        if len(self._chosen) > _CHOICES_KEPT:
            self._chosen.popitem(last=False)
        return variant

    def __contains__(self, compiled: Compiled) -> bool:
        return any(v.compiled is compiled for graphs in self._by_key.values() for v in graphs)

    def _keep(self, graphs: list[Variant], variant: Variant) -> None:
        if graphs:
            log.info("graphs=%d another for other sizes", len(graphs) + 1)
        graphs.append(variant)
        if len(graphs) > MAX_GRAPHS:
            dropped = graphs.pop(0)
            self._chosen = OrderedDict(
                (sizes, v) for sizes, v in self._chosen.items() if v is not dropped
            )
            warn_once(
                log,
                "%s takes more than %d ways for batches of different sizes: each new one is traced "
                "and the oldest is dropped; pad the batches to a few sizes",
                variant.compiled.name,
                MAX_GRAPHS,
            )


def _failing(
    variant: Variant, pieces: Callable[[Compiled], Sequence[Sequence[Tensor]]]
) -> Guard | None:
    found = (variant.compiled.probe.failing(piece) for piece in pieces(variant.compiled))
    return next((guard for guard in found if guard is not None), None)


def _different_graphs(guard: Guard, pieces: Sequence[Any]) -> InputError:
    return InputError(
        f"the {len(pieces)} microbatches of this batch differ in size, and the model takes "
        "different ways for them",
        at=guard.line,
        hint="choose a number of microbatches that divides the rows of the batch",
    )

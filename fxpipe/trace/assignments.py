"""Turns ``self.buffer = ...`` in a forward into a node that copies the value into the buffer.

The copy stands at the end of the graph, and what reads the buffer before reads a clone: eager code
leaves the old tensor to whoever still holds it, also to autograd.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx, nn

from fxpipe.compat import state_of
from fxpipe.ir.annotations import (
    module_path_of,
    mutates_of,
    result_is_of,
    set_module_path,
    set_mutates,
    set_result_is,
    set_source,
    set_updates_buffers,
    set_value,
    source_of,
    value_of,
)
from fxpipe.trace.proxies import UntraceableError, ValueProxy, proxies_in
from fxpipe.trace.state import Change

if TYPE_CHECKING:
    from fxpipe.trace.tracer import ValueTracer

log = logging.getLogger(__name__)


class Assignments:
    """What the traced code assigned to buffers, by the buffer's name; the last value counts."""

    def __init__(self, tracer: ValueTracer) -> None:
        self._tracer = tracer
        self.values: dict[str, ValueProxy] = {}
        self._places: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """While inside, a buffer that is set on a module is noted instead."""
        original = nn.Module.__setattr__

        def set_attribute(module: nn.Module, name: str, value: Any) -> None:
            buffer = state_of(module)[1].get(name)
            if self._tracer.busy or module not in self._tracer.submodule_paths:  # type: ignore[operator]
                original(module, name, value)
            elif buffer is not None:
                self._assign(name, buffer, value)
            elif isinstance(value, ValueProxy):
                vars(module)[name] = value  # refused after the trace, unless it is gone by then
            else:
                original(module, name, value)

        nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.__setattr__ = original  # type: ignore[method-assign]

    def _assign(self, attribute: str, buffer: Tensor, value: Any) -> None:
        name = self._tracer.state.name_of(buffer)
        held = value.value if isinstance(value, ValueProxy) else value
        assert name is not None  # it is the fake of one of the model's
        check_assigned(attribute, buffer, held)
        if held is buffer:
            return  # self.n += 1: written in place already
        self.note(name, value if isinstance(value, ValueProxy) else self._tracer.attribute(value))

    def note(self, name: str, value: ValueProxy) -> None:
        """Notes that the buffer with this name is to have this value in the end."""
        self.values[name] = value
        self._places[name] = self._tracer.place()

    def write_back(self) -> None:
        """Adds the copies at the end of the graph."""
        record, read = self._tracer.record, self._tracer.read_attribute
        # all values first: buffers may be set to one another
        values = {
            name: record("call_method", "detach", (proxy,), {})
            for name, proxy in self.values.items()
        }
        for name in values:
            _let_readers_clone(read(name).node)
        for name, value in values.items():
            copy = record("call_method", "copy_", (read(name), value), {})
            for node in (value.node, copy.node):
                set_source(node, self._places[name][0])
                set_module_path(node, self._places[name][1])


def check_assigned(attribute: str, buffer: Tensor, value: Any) -> None:
    """Checks that what is assigned to a buffer can be copied into it.

    Raises:
        UntraceableError: it cannot.
    """
    if not isinstance(value, Tensor):
        raise UntraceableError(f"sets its buffer {attribute!r} to {value!r} in its forward")
    if (value.shape, value.dtype, value.device) != (buffer.shape, buffer.dtype, buffer.device):
        raise UntraceableError(
            f"sets its buffer {attribute!r} to a tensor of another shape, dtype or device"
        )


def _let_readers_clone(read: fx.Node) -> None:
    if not read.users:
        return
    with read.graph.inserting_after(read):
        clone = read.graph.call_method("clone", (read,))
    set_value(clone, value_of(read))
    set_source(clone, source_of(read))
    set_module_path(clone, module_path_of(read))
    read.replace_all_uses_with(clone, delete_user_cb=lambda user: user is not clone)
    for user in clone.users:
        set_mutates(user, tuple(clone.name if n == read.name else n for n in mutates_of(user)))
        if result_is_of(user) == read.name:
            set_result_is(user, clone.name)
        if clone.name in mutates_of(user):
            set_updates_buffers(user, False)


def refuse_leaks(changes: list[Change]) -> None:
    """Checks that no attribute that the code set keeps a traced value.

    Raises:
        UntraceableError: one does; a run of the graph would not set it.
    """
    for change in changes:
        if proxies_in(change.value):
            raise leak(change)
        log.debug("attribute=%s set in forward; a run of the graph leaves it alone", change)


def leak(change: Change) -> UntraceableError:
    """What is wrong with an attribute that was set to a tensor."""
    return UntraceableError(
        f"keeps a tensor in its attribute {str(change)!r}, which no graph can set",
        "register it as a buffer of the same shape, or return it from the forward",
    )

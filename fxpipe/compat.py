"""Every private torch name that fxpipe uses, behind a public one of ours.

Each says on which versions of torch it was checked. A new minor version of torch is first looked at
here: ``tests/test_compat.py`` fails on a version that nobody looked at.
"""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
import torch.fx.traceback
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    unset_fake_temporarily,
)
from torch._subclasses.fake_tensor import (
    FakeTensor as FakeTensor,  # a type that is asked for; ``isinstance`` is all that is done
)
from torch._subclasses.fake_tensor import (
    FakeTensorMode as FakeTensorMode,  # a type in signatures; made by `fake_mode`
)
from torch.distributed.distributed_c10d import Store
from torch.fx import _symbolic_trace
from torch.utils._python_dispatch import TorchDispatchMode

CHECKED_VERSIONS = ("2.13", "2.14")
"""Minor versions of torch on which every name below was tried."""


def storage_id(tensor: Tensor) -> int:
    """Identity of the memory of a tensor, real or fake; views of one another have the same.

    ``UntypedStorage._cdata``, checked on 2.13.0 and 2.14.1. The public ``data_ptr`` raises on
    fakes.
    """
    return int(tensor.untyped_storage()._cdata)


def share_module(module: nn.Module) -> nn.Module:
    """A copy of a module with modes of its own, whose parameters and buffers are those of `module`.

    ``Module._modules`` and the layout of ``__dict__``, checked on 2.13.0 and 2.14.1. ``copy.copy``
    would share the dictionary of submodules, and with it their train and eval mode.
    """
    shared = type(module).__new__(type(module))
    vars(shared).update(vars(module))
    vars(shared)["_modules"] = {
        name: None if child is None else share_module(child)
        for name, child in module._modules.items()
    }
    return shared


def replace_state(module: nn.Module, old: Tensor, new: Tensor) -> None:
    """Puts `new` wherever a module itself (not its submodules) holds the parameter or buffer `old`.

    ``Module._parameters`` and ``_buffers``, checked on 2.13.0 and 2.14.1. The dictionaries are
    copied first, since a module made by `share_module` shares them with the original; recurrent
    layers hold lists of weights too.
    """
    for kind in ("_parameters", "_buffers"):
        if any(t is old for t in vars(module)[kind].values()):
            held = {n: new if t is old else t for n, t in vars(module)[kind].items()}
            vars(module)[kind] = held
    for name, value in list(vars(module).items()):
        if isinstance(value, list) and any(v is old for v in value):
            vars(module)[name] = [new if v is old else v for v in value]


def non_persistent_buffers(module: nn.Module) -> frozenset[str]:
    """Names of a module's own buffers that are not part of its state dict.

    ``Module._non_persistent_buffers_set``, checked on 2.13.0 and 2.14.1.
    """
    return frozenset(module._non_persistent_buffers_set)


def run_backward(
    roots: tuple[Tensor, ...], gradients: tuple[Tensor | None, ...], keep_graph: bool = False
) -> None:
    """``torch.autograd.backward`` without its argument checks, which cost 20 us a call.

    ``torch.autograd.graph._engine_run_backward``, checked on 2.13.0 and 2.14.1. It hands context
    variables to the threads of devices, which costs 5 us. Backward on the CPU stays in this thread,
    so there the engine is called itself: ``torch.autograd.Variable._execution_engine``, checked on
    2.14.1.
    """
    run = torch.autograd.graph._engine_run_backward
    if roots[0].device.type == "cpu":
        run = torch.autograd.Variable._execution_engine.run_backward
    run(roots, gradients, keep_graph, False, (), allow_unreachable=True, accumulate_grad=True)


class Container(NamedTuple):
    """How torch's pytree takes instances of a registered class apart and puts them together."""

    flatten: Callable[[Any], tuple[Iterable[Any], Any]]
    unflatten: Callable[[Iterable[Any], Any], Any]


def registered_container(cls: type) -> Container | None:
    """What was registered for `cls` with torch's pytree, by torch, a library or the user.

    ``torch.utils._pytree.SUPPORTED_NODES``, checked on 2.14.1.
    """
    if (node := torch.utils._pytree.SUPPORTED_NODES.get(cls)) is None:
        return None
    return Container(node.flatten_fn, node.unflatten_fn)


class _QuietFakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    # Where there is no device but the CPU, torch puts a stand-in for CUDA into the process as the
    # mode is entered. The next backward then starts a thread for each of its devices, and from
    # there on no forked process can run backward.
    avoid_device_init = False


def fake_mode() -> FakeTensorMode:
    """A mode under which operators compute shapes and no data; plain tensors are taken as fakes.

    ``torch._subclasses.FakeTensorMode`` and its ``avoid_device_init``, checked on 2.14.1. There is
    no public way to make one.
    """
    return _QuietFakeMode(allow_non_fake_inputs=True)


HigherOrderOperator: type = torch._ops.HigherOrderOperator
OpOverload: type = torch._ops.OpOverload
"""What calls of exported graphs are, besides Python functions of sizes.

``torch._ops``, checked on 2.14.1.
"""


@contextlib.contextmanager
def export_mode() -> Iterator[FakeTensorMode]:
    """The fake mode that ``torch.export`` works with inside: a model may hold fakes of it.

    ``torch._guards.tracing``, ``TracingContext`` and ``ShapeEnv``, checked on 2.14.1. Left to
    itself, export makes a mode of its own, and fakes of another cannot take part.
    """
    # imports sympy, 0.7 s that the other ways to capture a model do not need
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    shapes = ShapeEnv(tracked_fakes=[], trace_asserts=True)
    mode = FakeTensorMode(allow_non_fake_inputs=True, export=True, shape_env=shapes)
    with tracing(TracingContext(mode)):
        yield mode


@contextlib.contextmanager
def export_hidden() -> Iterator[None]:
    """Lets code that asks whether it is exported or compiled do what it does in eager mode.

    ``torch.compiler._is_exporting_flag`` and ``_is_compiling_flag``, checked on 2.14.1. Libraries
    take other ways for export, which give other bits.
    """
    flags = torch.compiler._is_exporting_flag, torch.compiler._is_compiling_flag
    torch.compiler._is_exporting_flag = torch.compiler._is_compiling_flag = False
    try:
        yield
    finally:
        torch.compiler._is_exporting_flag, torch.compiler._is_compiling_flag = flags


@contextlib.contextmanager
def nodes_annotated(key: str, value: object) -> Iterator[None]:
    """While inside, the nodes that export makes carry `value`; see `annotation_of`.

    ``torch.fx.traceback.annotate``, which says that it may change; checked on 2.14.1.
    """
    with torch.fx.traceback.annotate({key: value}):
        yield


def annotations_kept() -> contextlib.AbstractContextManager[None]:
    """Around an export: without it ``nodes_annotated`` does nothing (2.14.1)."""
    return torch.fx.traceback.preserve_node_meta()


def annotation_of(node: fx.Node, key: str) -> Any:
    """What `nodes_annotated` gave to a node, or None."""
    return node.meta.get("custom", {}).get(key)


EXPORTED_REGIONS = (
    torch.ops.higher_order.wrap_with_set_grad_enabled,
    torch.ops.higher_order.wrap_with_autocast,
)
"""Operators that hold a region of an exported graph as a graph of their own; checked on 2.14.1.

Arguments: ``(enabled, graph, *inputs)`` and ``(device, dtype, enabled, cache_enabled, graph,
*inputs)``.
"""

EXPORT_GUARDS = "_guards_fn"
"""The module of ``ExportedProgram.module()`` that asserts what was found of the sizes of the
example; checked on 2.14.1."""


def run_export_guards(
    guards: nn.Module, inputs: Sequence[Any], after: Callable[[str], None]
) -> None:
    """Runs these assertions on any stand-in for the inputs; `after` gets the text of each.

    ``torch._assert``, which they call with their text, checked on 2.14.1.
    """
    original = torch._assert

    def note(condition: object, message: object) -> None:
        after(str(message).removeprefix("Guard failed: "))

    torch._assert = note
    try:
        guards.forward(*inputs)
    finally:
        torch._assert = original


DataDependent = (DataDependentOutputException, DynamicOutputShapeException)
"""What a fake tensor raises when data is asked of it.

``torch._subclasses.fake_tensor``, checked on 2.14.1.
"""


@contextlib.contextmanager
def wrapped_functions_made_by(
    make: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Iterator[None]:
    """Lets `make` build what stands for a function given to ``torch.fx.wrap`` while fx traces.

    ``torch.fx._symbolic_trace._create_wrapped_func``, checked on 2.14.1. fx's own expects a proxy
    for every result, which fails for functions that return a tuple.
    """
    original = _symbolic_trace._create_wrapped_func
    _symbolic_trace._create_wrapped_func = make  # type: ignore[assignment]
    try:
        yield
    finally:
        _symbolic_trace._create_wrapped_func = original


def forget_tracer(graph: fx.Graph) -> None:
    """Lets a graph module made of `graph` be unpickled by fx's own tracer.

    ``Graph._tracer_cls``, checked on 2.14.1: the class is called without arguments when unpickling.
    """
    graph._tracer_cls = None


set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""The function that ``no_grad`` and its kin call, seen by function modes; checked on 2.14.1."""

enter_autocast: Callable[..., Any] = torch.amp.autocast_mode._enter_autocast
exit_autocast: Callable[[Any], None] = torch.amp.autocast_mode._exit_autocast
"""Open and close an autocast region, as torch.export records them; checked on 2.14.1."""


def autocast_arguments(region: torch.autocast) -> tuple[str, torch.dtype, bool, bool]:
    """What `enter_autocast` takes to open the same region.

    ``autocast._enabled`` and ``_cache_enabled``, checked on 2.14.1.
    """
    dtype = region.fast_dtype
    assert dtype is not None
    return region.device, dtype, region._enabled, region._cache_enabled


CHECKPOINT_GENERATORS = tuple(
    name
    for name in (
        "_checkpoint_without_reentrant_generator_impl",
        "_checkpoint_without_reentrant_generator",
    )
    if hasattr(torch.utils.checkpoint, name)
)
"""Generators in ``torch.utils.checkpoint`` that run up to their yield before the function of
``checkpoint(use_reentrant=False)`` and to their end after it; checked on 2.14.1."""


def state_of(
    module: nn.Module,
) -> tuple[dict[str, nn.Parameter | None], dict[str, Tensor | None]]:
    """A module's own dictionaries of parameters and of buffers; to write them is to replace state.

    ``Module._parameters`` and ``Module._buffers``, checked on 2.14.1.
    """
    return module._parameters, module._buffers


class Group(Protocol):
    """A c10d backend, called without the registry and the dispatcher that ``dist`` puts around it.

    Peers are indices in the group. The methods are public; torch's stubs leave them out.
    """

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def send(self, tensors: Sequence[Tensor], peer: int, tag: int, /) -> dist.Work: ...
    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int, /) -> dist.Work: ...
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], /) -> dist.Work: ...
    def abort(self) -> None: ...
    def shutdown(self) -> None: ...


def gloo_device() -> object:
    """What moves the data of the gloo groups made over it: one thread, and one network interface.

    ``ProcessGroupGloo.create_device``, checked on 2.13.0 and 2.14.1. Left to itself, a group opens
    one set of connections for each interface in GLOO_SOCKET_IFNAME, of which a failure closes one.
    """
    make = cast(Any, dist.ProcessGroupGloo)
    if interface := os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        return make.create_device(interface=interface, lazy_init=False)
    return make.create_default_device(lazy_init=False)


def gloo_group(store: Store, rank: int, size: int, device: object = None) -> Group:
    """A gloo group of its own, with one connection to each peer, all made now.

    ``ProcessGroupGloo._Options``, checked on 2.13.0 and 2.14.1. Without options the group follows
    TORCH_GLOO_LAZY_INIT, and the first transfer between two ranks then blocks until both have begun
    one.

    Args:
        store: holds the addresses, and those of no other group.
        rank: in the group.
        size: of the group.
        device: of `gloo_device`; None: one of its own.
    """
    make = cast(Any, dist.ProcessGroupGloo)
    options = make._Options()
    options._devices = [gloo_device() if device is None else device]
    return cast(Group, make(store, rank, size, options))


def apply(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    """``function.apply(...)``; named like the method, so that `bound_apply` pickles as it."""
    return function.apply(*args, **kwargs)


def bound_apply(function: type[torch.autograd.Function]) -> types.MethodType:
    """``function.apply`` as a callable whose module and class can be asked for.

    ``Function.apply`` is a C method without ``__module__``, checked on 2.14.1: fx cannot name it.
    """
    return types.MethodType(apply, function)


DispatchMode = TorchDispatchMode
"""Sees every operator below autograd, under its ``aten`` name.

``torch.utils._python_dispatch.TorchDispatchMode``, checked on 2.14.1.
"""


ATTENTION_KERNELS = "_sdpa_kernel"
"""The function in ``torch.nn.attention`` behind ``sdpa_kernel``; checked on 2.14.1."""


def found_infinities(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer
) -> dict[torch.device, Tensor]:
    """What a scaler found in the gradients of an optimizer: 1.0 for not finite, by device;
    writable.

    ``GradScaler._per_optimizer_states``, checked on 2.13.0 and 2.14.1; ``ShardedGradScaler``,
    torch's own subclass, reads it too.
    """
    found: dict[torch.device, Tensor] = scaler._per_optimizer_states[id(optimizer)][
        "found_inf_per_device"
    ]
    return found


assert_: Callable[[bool, str], None] = torch._assert
"""``torch._assert``, an assertion that fx can trace; checked on 2.13.0 and 2.14.1."""


def no_fake_mode() -> contextlib.AbstractContextManager[Any]:
    """Real tensors again, inside of a fake mode.

    ``torch._subclasses.fake_tensor.unset_fake_temporarily``, checked on 2.13.0 and 2.14.1.
    """
    real: contextlib.AbstractContextManager[Any] = unset_fake_temporarily()
    return real

"""Runs a model pipelined and plain on the same microbatches, and compares every number.

**Terms.** The *plain* run is one process that takes the microbatches one after another through the
model as it is, weighs their losses as the pipeline does, and calls ``backward`` on each.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tabulate
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxpipe import api, tree
from fxpipe.compiler import first_microbatch
from fxpipe.errors import OptionError
from fxpipe.ir.text import format_type
from fxpipe.options import CompileOptions, Loss
from fxpipe.pipeline import Pipeline
from fxpipe.runtime.launch import is_distributed
from fxpipe.runtime.loss import output_is_loss
from fxpipe.runtime.microbatches import (
    combine,
    loss_weights,
    merge_leaves,
    piece_rows,
    split_target,
)
from fxpipe.trace.inputs import InputBinder

_BITS = {True: "equal", False: "differ"}
_RANDOM_ON_EACH_RANK = (
    "the model draws random numbers, and each rank its own: without torchrun they are those of the "
    "plain run"
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One value of the pipelined run beside that of the plain run.

    Args:
        kind: ``"output"``, ``"loss"``, ``"gradient"`` or ``"buffer"``.
        name: the parameter or buffer, or the path of the value in the output.
        type: dtype and shape in the plain run, ``f32[8, 16]``.
        equal: equal bit for bit, as ``torch.equal`` says; nan equals nan in the same place, and a
            gradient that is None equals zeros.
        difference: largest absolute difference; infinite where the two cannot be subtracted.
        note: what the numbers do not say.
    """

    kind: str
    name: str
    type: str
    equal: bool
    difference: float
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Verification:
    """What `verify` found, the same on every rank.

    >>> row = Row("loss", "loss", "f32[]", True, 0.0)
    >>> print(Verification((row,)))
    kind    name    type    bits      largest difference  note
    ------  ------  ------  ------  --------------------  ------
    loss    loss    f32[]   equal                      0
    <BLANKLINE>
    1 of 1 equal bit for bit

    Args:
        rows: outputs, the loss, gradients and buffers, in the order of the model.
        remark: a reason for differences that no row has.
    """

    rows: tuple[Row, ...]
    remark: str = ""

    @property
    def ok(self) -> bool:
        """Whether everything is equal bit for bit."""
        return all(row.equal for row in self.rows)

    def within(self, tol: float) -> bool:
        """Whether nothing differs by more than `tol`."""
        return all(row.difference <= tol for row in self.rows)

    def __str__(self) -> str:
        headers = ["kind", "name", "type", "bits", "largest difference", "note"]
        cells = [
            (r.kind, r.name, r.type, _BITS[r.equal], f"{r.difference:.3g}", r.note)
            for r in self.rows
        ]
        remark = "" if self.ok or not self.remark else f"\n{self.remark}"
        return f"{tabulate.tabulate(cells, headers)}\n\n{self._summary()}{remark}"

    def _summary(self) -> str:
        line = f"{sum(r.equal for r in self.rows)} of {len(self.rows)} equal bit for bit"
        if self.ok:
            return line
        worst = max((r for r in self.rows if not r.equal), key=lambda r: r.difference)
        return f"{line}, largest difference {worst.difference:.3g} in {worst.kind} {worst.name}"


def verify(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    target: Any = None,
    *,
    stages: int,
    loss: Loss | None = None,
    **compile_options: Any,
) -> Verification:
    """Runs one batch pipelined and plain, and compares outputs, loss, gradients and buffers.

    Both runs take a copy of the model, of the loss and of the batch, and start from the state the
    random numbers have now; the model that was handed in, and that state, are as before. In eval
    mode, or inside ``torch.no_grad()``, both run forward alone.

    Two things may differ by rounding or by chance. The gradient of a large parameter that is tied
    over several stages is summed stage by stage, and plain microbatch by microbatch. Under torchrun
    every rank compares what it holds with a plain run of its own, and draws its own random numbers,
    if the model draws any.

    Args:
        model: in the mode that is wanted; each process holds it three times while this runs.
        args: positional inputs, a whole batch.
        kwargs: keyword inputs.
        target: what the loss compares with; a whole batch.
        stages: S.
        loss: as for ``compile``. None in eval mode: no loss is computed.
        compile_options: the other options of ``compile``, but for ``example_inputs``, which are the
            batch.

    Raises:
        FxpipeError: the model cannot be compiled, or a rank failed.
    """
    if any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]):
        raise OptionError("a model on the meta device has no values to run plain")
    batch = _batch(model, args, kwargs or {}, target)
    backward = model.training and torch.is_grad_enabled()
    # together, since a loss may be a method of the model
    copied, copied_loss = copy.deepcopy((model, loss))
    inputs = (batch.args, batch.kwargs)
    # the comparison on one microbatch that compile makes would refuse what is to be shown here
    compile_options = {"verify": False, **compile_options}
    with torch.random.fork_rng(devices=_cuda_devices()):
        pipe = api.compile(
            copied, stages, loss=copied_loss, example_inputs=inputs, **compile_options
        )
    with torch.random.fork_rng(devices=_cuda_devices()):
        pipelined = _run_pipelined(pipe, _copied(batch))
    copied, copied_loss = copy.deepcopy((model, loss))
    copied.to(_device_of(pipe, batch))
    options = dataclasses.replace(pipe.options, loss=copied_loss)
    with torch.random.fork_rng(devices=_cuda_devices()), torch.set_grad_enabled(backward):
        before = _random_state()
        plain = _run_plain(
            copied, _copied(batch), options, pipe.output_dims(batch.args, batch.kwargs)
        )
        draws = any(not torch.equal(a, b) for a, b in zip(before, _random_state(), strict=True))
    is_part = is_distributed() and options.transport != "local"
    rows = _compare(pipelined, plain, backward=backward, is_part=is_part)
    found = {(row.kind, row.name): row for row in rows}
    everywhere = _gather(found) if is_part else [found]
    merged = _merge(everywhere, plain, backward=backward)
    return Verification(
        tuple(_explain(row, pipe.plan.tied) for row in merged),
        _RANDOM_ON_EACH_RANK if draws and is_part else "",
    )


class _Batch(NamedTuple):
    """What a model is called with, and the target of its loss."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any


def _batch(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any) -> _Batch:
    kwargs = dict(kwargs)
    if "target" in InputBinder(model).signature.parameters:  # the model computes the loss itself
        target = kwargs.setdefault("target", target)
    return _Batch(tuple(args), kwargs, target)


@dataclasses.dataclass(frozen=True)
class _Results:
    """What one run left: on a rank, of the stages it holds.

    ``output`` and ``loss`` are None where there is none.
    """

    output: Any
    loss: Tensor | None
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]


def _run_pipelined(pipe: Pipeline, batch: _Batch) -> _Results:
    if pipe.options.loss is None and not (pipe.training and torch.is_grad_enabled()):
        output, loss = pipe(*batch.args, **batch.kwargs), None
    else:
        kwargs = {name: value for name, value in batch.kwargs.items() if name != "target"}
        result = pipe.step(*batch.args, target=batch.target, **kwargs)
        output, loss = result.output, result.loss
    gradients = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    return _Results(output, loss, gradients, dict(pipe.named_buffers()))


def _run_plain(
    model: nn.Module, batch: _Batch, options: CompileOptions, output_dims: Sequence[int | None]
) -> _Results:
    with_backward = torch.is_grad_enabled()
    with_loss = options.loss is not None or with_backward
    pieces, weights = _microbatches(model, batch, options)
    outputs, losses, structure = [], [], None
    for piece, weight in zip(pieces, weights, strict=True):
        output = model(*piece.args, **piece.kwargs)
        if with_loss:
            loss = (options.loss or output_is_loss)(output, piece.target)
            losses.append(loss.detach())
            if with_backward:
                (loss * weight).backward()
        leaves, structure = tree.flatten(output)
        outputs.append([x.detach() if isinstance(x, Tensor) else x for x in leaves])
    assert structure is not None  # there is a microbatch
    return _Results(
        structure.unflatten(merge_leaves(outputs, weights, output_dims)),
        combine(losses, weights) if with_loss else None,
        {name: parameter.grad for name, parameter in model.named_parameters()},
        dict(model.named_buffers()),
    )


def _microbatches(
    model: nn.Module, batch: _Batch, options: CompileOptions
) -> tuple[list[_Batch], list[float]]:
    """The microbatches, and what the loss of each counts."""
    binder = InputBinder(model)
    bound = binder.bind(batch.args, batch.kwargs)
    dims = first_microbatch(model, batch.args, batch.kwargs, options).dims
    rows = dims.rows(bound.tensors)
    count = min(options.wanted_microbatches, rows)
    targets = split_target(batch.target, rows, count)
    pieces = []
    for piece, target in zip(dims.split(bound.tensors, count), targets, strict=True):
        tensors = iter(piece)
        leaves = [next(tensors) if isinstance(x, Tensor) else x for x in bound.leaves]
        arguments = bound.structure.unflatten(leaves)
        pieces.append(_Batch(*binder.call_form(arguments, batch.args, batch.kwargs), target))
    return pieces, loss_weights(piece_rows(rows, count), options.loss_reduction)


def _copied(batch: _Batch) -> _Batch:
    """The batch with tensors of its own: a model may write to its inputs."""

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)

    return _Batch(*(tree.map_leaves(copied, part) for part in batch))


def _cuda_devices() -> list[int]:
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.cuda.current_device()] if initialized else []


def _random_state() -> list[Tensor]:
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, _cuda_devices())]


def _device_of(pipe: Pipeline, batch: _Batch) -> torch.device:
    """Where this rank computes: under torchrun not always where the model was."""
    inputs = (leaf for leaf in tree.flatten(batch)[0] if isinstance(leaf, Tensor))
    return next(itertools.chain(pipe.parameters(), inputs)).device


def _compare(here: _Results, plain: _Results, *, backward: bool, is_part: bool) -> Iterator[Row]:
    """One row for each value that this process holds.

    Args:
        is_part: other processes hold the rest.
    """
    if here.output is not None or not is_part:
        yield from _compare_outputs(here.output, plain.output)
    if plain.loss is not None:
        yield _compare_values("loss", "loss", here.loss, plain.loss)
    if backward:
        for name, gradient in here.gradients.items():
            yield _compare_gradients(name, gradient, plain.gradients[name])
    for name, buffer in here.buffers.items():
        yield _compare_values("buffer", name, buffer, plain.buffers[name])


def _compare_outputs(output: Any, plain: Any) -> Iterator[Row]:
    leaves, structure = tree.flatten(output)
    plain_leaves, plain_structure = tree.flatten(plain)
    if structure != plain_structure:
        note = f"{structure}, plain: {plain_structure}"
        yield from (_unlike("output", name, note) for name in plain_structure.names("output"))
        return
    for name, leaf, plain_leaf in zip(structure.names("output"), leaves, plain_leaves, strict=True):
        yield _compare_values("output", name, leaf, plain_leaf)


def _compare_gradients(name: str, gradient: Tensor | None, plain: Tensor | None) -> Row:
    if gradient is None and plain is None:
        return Row("gradient", name, "", True, 0.0, "None")
    note = ""
    if gradient is None and plain is not None:
        gradient, note = torch.zeros_like(plain), "None, plain: a tensor"
    elif plain is None and gradient is not None:
        plain, note = torch.zeros_like(gradient), "a tensor, plain: None"
    row = _compare_values("gradient", name, gradient, plain)
    if note and row.equal:
        note = note.replace("a tensor", "zeros")
    return dataclasses.replace(row, note=note or row.note)


def _compare_values(kind: str, name: str, value: Any, plain: Any) -> Row:
    if not (isinstance(value, Tensor) and isinstance(plain, Tensor)):
        if value is plain or (type(value) is type(plain) and value == plain):
            return Row(kind, name, format_type(plain), True, 0.0)
        return _unlike(kind, name, f"{_shown(value)}, plain: {_shown(plain)}")
    if value.dtype != plain.dtype or value.shape != plain.shape:
        return _unlike(kind, name, f"{_shown(value)}, plain: {_shown(plain)}")
    equal, difference, note = _difference(_dense(value).to(plain.device), _dense(plain))
    return Row(kind, name, format_type(plain), equal, difference, note)


def _explain(row: Row, tied: Mapping[str, Sequence[int]]) -> Row:
    if row.equal or row.kind != "gradient" or row.name not in tied:
        return row
    stages = ", ".join(map(str, tied[row.name]))
    return dataclasses.replace(row, note=f"tied over stages {stages}; {row.note}")


def _unlike(kind: str, name: str, note: str) -> Row:
    return Row(kind, name, "", equal=False, difference=math.inf, note=note)


def _shown(value: Any) -> str:
    return format_type(value) if isinstance(value, Tensor) else repr(value)


def _dense(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _difference(value: Tensor, plain: Tensor) -> tuple[bool, float, str]:
    """Whether two tensors of one type are equal, by how much they differ, and a note."""
    if torch.equal(value, plain):
        return True, 0.0, ""
    if not (value.is_floating_point() or value.is_complex()):
        # exact in int64, where float64 would lose the last bits of a large count
        apart = (value.to(torch.int64) - plain.to(torch.int64)).abs()
        return False, float(apart.max()), f"{int(apart.count_nonzero())} of {apart.numel()} differ"
    wide = torch.complex128 if value.is_complex() else torch.float64
    value, plain = value.to(wide), plain.to(wide)
    same = (value == plain) | (value.isnan() & plain.isnan())
    if same.all():
        return True, 0.0, "nan in the same places"
    apart = (value - plain).abs()[~same].nan_to_num(nan=math.inf, posinf=math.inf)
    return False, float(apart.max()), f"{apart.numel()} of {same.numel()} differ"


_Found = Mapping[tuple[str, str], Row]


def _gather(found: _Found) -> list[_Found]:
    """What every process found."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, found)
    return parts


def _merge(everywhere: Sequence[_Found], plain: _Results, *, backward: bool) -> Iterator[Row]:
    """A row for each value of the plain run: the worst of the ranks that hold it."""
    for key in _expected(plain, backward=backward):
        rows = [found[key] for found in everywhere if key in found]
        if rows:
            yield max(rows, key=lambda row: (not row.equal, row.difference))
        else:
            yield _unlike(*key, "on no rank")


def _expected(plain: _Results, *, backward: bool) -> Iterator[tuple[str, str]]:
    yield from (("output", name) for name in tree.flatten(plain.output)[1].names("output"))
    if plain.loss is not None:
        yield "loss", "loss"
    if backward:
        yield from (("gradient", name) for name in plain.gradients)
    yield from (("buffer", name) for name in plain.buffers)

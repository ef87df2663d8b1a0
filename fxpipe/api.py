"""``fxpipe.compile``: the options of a pipeline, from keywords to one checked value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from fxpipe.options import CompileOptions, Init, Loss, WeightSource
from fxpipe.pipeline import Pipeline

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def compile(
    model: nn.Module,
    stages: int,
    *,
    loss: Loss | None = None,
    microbatches: int | None = None,
    schedule: str = "1F1B",
    chunks: int = 1,
    cuts: Sequence[str] | None = None,
    balance: str = "time",
    batch_dims: Mapping[str, int | None] | None = None,
    loss_reduction: str = "mean",
    example_inputs: tuple[Sequence[Any], Mapping[str, Any]] | None = None,
    outputs: str = "last",
    engine: str = "autograd",
    activation_checkpoint: str = "never",
    transport: str = "auto",
    mesh: DeviceMesh | None = None,
    weights: WeightSource | None = None,
    init: Init | None = None,
    verify: bool | None = None,
    leaf_modules: Sequence[str | type] = (),
) -> Pipeline:
    """Cuts a model into stages that run as a pipeline.

    Under torchrun every rank makes the same call, and rank r runs stage r. Without torchrun all
    ranks run in this process.

    Args:
        model: on the CPU, or on the meta device; its code and structure are never modified, its
            parameters are shared.
        stages: S, the contiguous parts of the model; the number of ranks is stages / chunks.
        loss: ``loss(output, target)`` -> 0-dim tensor. None: ``step`` treats the output, or what it
            holds as ``loss``, as the loss.
        microbatches: M; None: 4 * stages. Never more than the rows of the batch.
        schedule: ``"GPipe"`` or ``"1F1B"``.
        chunks: V, stages a rank holds; both schedules hold one.
        cuts: names of modules or nodes at which a new stage starts; None: balanced.
        balance: what balanced cuts even out: ``"time"``, as estimated from FLOPs and bytes, or
            ``"parameters"``, bytes of parameters.
        batch_dims: parameter name of ``forward`` -> dimension along which microbatches are cut;
            None: every microbatch gets it whole. Default: dimension 0.
        loss_reduction: ``"mean"``: the loss of the batch is the row-weighted mean of the microbatch
            losses; ``"sum"``: their sum. Gradients are those of that loss.
        example_inputs: (args, kwargs) of a batch; None: compiled at the first step from its batch.
        outputs: which ranks get the output of a step: ``"last"``, those that hold the last stage,
            or ``"all"``.
        engine: how a stage runs backward: ``"autograd"``.
        activation_checkpoint: ``"never"``: everything backward needs is kept.
        transport: ``"auto"``: between processes under torchrun, else ``"local"``; or ``"gloo"``,
            ``"nccl"``.
        mesh: mesh with a ``"pp"`` dimension; None: one over all ranks.
        weights: for a model on the meta device: a state dict, or the path of one (``.safetensors``,
            ``.safetensors.index.json``, or what ``torch.save`` wrote). Each rank reads its own
            stages alone.
        init: ``init(name, tensor)`` fills, in place, what `weights` does not have. Its random
            numbers depend on the seed and the name alone, so that every rank makes the same.
        verify: run one microbatch of the batch it is compiled with through copies of the model and
            of the stages, and refuse if outputs, gradients or buffers differ. None: if the model
            has its values and at most 20 million of them.
        leaf_modules: modules that the trace keeps whole, as FQNs or classes.

    Returns:
        The pipeline, with `step`, `train`, `eval`, `named_parameters` and so on.

    Raises:
        FxpipeError: an option cannot work, or the model cannot be traced or cut.
    """
    options = CompileOptions(
        stages=stages,
        loss=loss,
        microbatches=microbatches,
        schedule=schedule,
        chunks=chunks,
        cuts=None if cuts is None else tuple(cuts),
        balance=balance,
        batch_dims=dict(batch_dims or {}),
        loss_reduction=loss_reduction,
        outputs=outputs,
        engine=engine,
        activation_checkpoint=activation_checkpoint,
        transport=transport,
        weights=weights,
        init=init,
        verify=verify,
        leaf_modules=tuple(leaf_modules),
    )
    inputs = None if example_inputs is None else (tuple(example_inputs[0]), dict(example_inputs[1]))
    return Pipeline(model, options, mesh=mesh, example_inputs=inputs)

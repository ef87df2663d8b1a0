"""Activation checkpoints in the user's own code."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe import ops
from fxpipe.runtime.regions import CheckpointRegion


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(8, 32), nn.Linear(32, 8), nn.Dropout(0.2)
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x + self.drop(self.b(torch.tanh(self.a(x)))) * self.gain


class Net(nn.Module):
    def __init__(self, checkpointed, depth=6):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.out = nn.Linear(8, 2)
        self.checkpointed = checkpointed

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.out(x)


def made(checkpointed, stages=4, **options):
    torch.manual_seed(0)
    model = Net(checkpointed)
    x, y = torch.randn(8, 8), torch.randn(8, 2)
    loss = nn.functional.mse_loss
    example = ((x,), {})
    pipe = fxpipe.compile(
        model, stages, loss=loss, microbatches=4, example_inputs=example, **options
    )
    return model, pipe, x, y


def regions(pipe, stages=4):
    return [
        module
        for s in range(stages)
        for module in pipe.graph(s).modules()
        if isinstance(module, CheckpointRegion)
    ]


def test_checkpoints_of_the_user_become_regions_of_the_stages():
    _, pipe, _, _ = made(checkpointed=True)
    assert len(regions(pipe)) >= 6
    assert not regions(made(checkpointed=False)[1])
    for region in regions(pipe):
        assert not {ops.send, ops.recv} & {n.target for n in region.body.graph.nodes}
        assert not list(region.parameters())


@pytest.mark.parametrize("stages", [1, 3, 4, 5])
def test_a_pipeline_with_checkpoints_has_the_bits_of_the_plain_model_with_dropout(stages):
    model, pipe, x, y = made(checkpointed=True, stages=stages)
    plain = copy.deepcopy(model)
    torch.manual_seed(1)
    pipe.step(x, target=y)
    torch.manual_seed(1)
    for a, b in zip(x.split(2), y.split(2), strict=True):
        (nn.functional.mse_loss(plain(a), b) * 0.25).backward()
    for (name, p), q in zip(pipe.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name


def kept_bytes(pipe, x, y):
    """Bytes that autograd keeps between the forwards and the backwards of a step."""
    kept = 0

    def pack(tensor):
        nonlocal kept
        kept += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        pipe.step(x, target=y)
    return kept


def test_what_a_region_computes_is_not_kept():
    _, pipe, x, y = made(checkpointed=True, cuts=["layers.2", "layers.4", "out"])
    _, full, _, _ = made(checkpointed=False, cuts=["layers.2", "layers.4", "out"])
    assert kept_bytes(pipe, x, y) < kept_bytes(full, x, y)


def test_a_stage_with_regions_pickles():
    _, pipe, _, _ = made(checkpointed=True)
    module = pickle.loads(pickle.dumps(pipe.graph(1)))
    assert any(isinstance(m, CheckpointRegion) for m in module.modules())

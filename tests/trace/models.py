"""Models that the tests of tracing share, and the comparison with the model itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpipe.trace import Traced
from fxpipe.tree import flatten


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        split = self.qkv(x).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, -1))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attn(self.norm1(x)), self.dropout, self.training)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A causal decoder that reads sizes in its forward; the head is tied to the embedding."""

    def __init__(self, vocab: int = 31, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, 2, 0.1) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        _, length = tokens.size()
        x = self.embed(tokens) + self.position(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def assert_same(
    traced: Traced, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> None:
    """The graph and the model give the same outputs, gradients and buffers, bit for bit."""
    kwargs = kwargs or {}
    start = {name: value.clone() for name, value in model.state_dict().items()}

    def run(call: Any) -> tuple[Any, dict[str, Tensor | None], dict[str, Tensor]]:
        with torch.no_grad():
            for name, value in model.state_dict().items():
                value.copy_(start[name])
        model.zero_grad()
        torch.manual_seed(0)
        output = call()
        tensors = [x for x in flatten(output)[0] if isinstance(x, Tensor)]
        losses = [x.pow(2).sum() for x in tensors if x.requires_grad]
        if losses:
            torch.stack(losses).sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        return output, gradients, {name: b.clone() for name, b in model.named_buffers()}

    # the graph first: a forward that sets a buffer leaves the model another tensor than the graph's
    got = run(lambda: traced.output.unflatten(traced.module(*traced.inputs.bind(args, kwargs))))
    want = run(lambda: model(*args, **kwargs))
    for one, other in zip(want, got, strict=True):
        one_leaves, one_spec = flatten(one)
        other_leaves, other_spec = flatten(other)
        assert one_spec == other_spec
        for a, b in zip(one_leaves, other_leaves, strict=True):
            assert torch.equal(a, b) if isinstance(a, Tensor) else a == b

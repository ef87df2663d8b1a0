"""Models of the benchmarks: chains of blocks, so that stages can be made by hand too."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, how it is cut, and one batch for it.

    Args:
        model: a chain of named blocks.
        cuts: names of the blocks at which stages 1, 2, ... start.
        loss: ``loss(output, target)`` -> 0-dim tensor, a mean over rows.
        inputs: the batch, [rows, ...].
        target: what its outputs are compared with, [rows, ...].
        microbatches: M; divides the rows.
    """

    model: nn.Sequential
    cuts: tuple[str, ...]
    loss: Callable[[Tensor, Tensor], Tensor]
    inputs: Tensor
    target: Tensor
    microbatches: int

    def stages(self) -> list[nn.Sequential]:
        """The model as one module a stage, sharing its parameters and keeping their names."""
        stages: list[OrderedDict[str, nn.Module]] = [OrderedDict()]
        for name, block in self.model.named_children():
            if name in self.cuts:
                stages.append(OrderedDict())
            stages[-1][name] = block
        return [nn.Sequential(blocks) for blocks in stages]


def tiny(stages: int, microbatches: int, *, rows: int = 4, width: int = 32) -> Workload:
    """Two linear layers a stage: next to no arithmetic, so a step is what the runtime costs.

    Args:
        stages: S.
        microbatches: M.
        rows: of one microbatch.
        width: features of every layer.
    """
    torch.manual_seed(0)
    blocks = OrderedDict((f"linear_{i}", nn.Linear(width, width)) for i in range(2 * stages))
    cuts = tuple(f"linear_{2 * s}" for s in range(1, stages))
    inputs, target = torch.randn(2, rows * microbatches, width)
    return Workload(nn.Sequential(blocks), cuts, F.mse_loss, inputs, target, microbatches)


def gpt(
    stages: int,
    microbatches: int,
    *,
    blocks: int = 8,
    rows: int = 2,
    tokens: int = 64,
    width: int = 128,
    heads: int = 4,
    vocab: int = 512,
) -> Workload:
    """A causal decoder, cut evenly between its blocks.

    Args:
        stages: S, at most `blocks`.
        microbatches: M.
        blocks: decoder blocks; the embedding goes with the first, the head with the last.
        rows: of one microbatch.
        tokens: length of a row.
        width: features of a token, a multiple of `heads`.
        heads: of each attention.
        vocab: number of different tokens.
    """
    torch.manual_seed(0)
    decoder = [(f"block_{i}", DecoderBlock(width, heads)) for i in range(blocks)]
    chain: Sequence[tuple[str, nn.Module]] = [
        ("embedding", Embedding(vocab, tokens, width)),
        *decoder,
        ("norm", nn.LayerNorm(width)),
        ("head", nn.Linear(width, vocab, bias=False)),
    ]
    cuts = tuple(f"block_{s * blocks // stages}" for s in range(1, stages))
    text = torch.randint(vocab, (rows * microbatches, tokens + 1))
    inputs, target = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    model = nn.Sequential(OrderedDict(chain))
    return Workload(model, cuts, next_token_loss, inputs, target, microbatches)


def next_token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of logits [rows, tokens, vocab] against tokens [rows, tokens]."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class Embedding(nn.Module):
    """Token plus learned position embedding: [rows, tokens] -> [rows, tokens, width]."""

    def __init__(self, vocab: int, tokens: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.position = nn.Parameter(torch.randn(tokens, width) * 0.02)

    def forward(self, text: Tensor) -> Tensor:
        return self.token(text) + self.position


class DecoderBlock(nn.Module):
    """Pre-norm causal attention and feed-forward, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.feed_forward_norm(x))))

    def attention(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.size(0), x.size(1), x.size(2)
        split = self.qkv(x).view(rows, tokens, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.mix(mixed.transpose(1, 2).reshape(rows, tokens, width))

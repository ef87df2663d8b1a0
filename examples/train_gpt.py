"""Trains a GPT of 12 blocks, character by character, on the sources of Python's standard library.

torchrun --nproc-per-node 4 examples/train_gpt.py   # one stage a process
python examples/train_gpt.py                        # 4 stages, all in this process
"""

import argparse
import os
import statistics
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, characters: int, length: int, width: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.token = nn.Embedding(characters, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(blocks)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        self.head.weight = self.token.weight  # tied: used by the first stage and by the last

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.token(x) + self.position)))


def loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def library_text(most: int = 1_000_000) -> str:
    """The first million characters of the standard library's own modules, sorted by name."""
    text = ""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_text(encoding="utf-8")
        if len(text) >= most:
            break
    return text[:most]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows", type=int, default=32, help="sequences in a batch")
    parser.add_argument("--length", type=int, default=64, help="characters in a sequence")
    parser.add_argument("--width", type=int, default=128, help="a multiple of the 4 heads")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--microbatches", type=int, help="default: 4 a stage")
    parser.add_argument("--schedule", default="1F1B", help="1F1B or GPipe")
    return parser.parse_args()


def conditions() -> str:
    """What to know of the bubble that was measured."""
    processes, here = (int(os.environ.get(n, "1")) for n in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if processes == 1:
        return "all ranks in one process: measured actions, placed as if each rank had a core"
    if here > cores:
        return f"{here} processes share {cores} cores: waiting for a core is measured too"
    return "each rank in a process with a core of its own"


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # every rank builds the same model and draws the same batches
    stages, rank = int(os.environ.get("WORLD_SIZE", "4")), int(os.environ.get("RANK", "0"))

    text = library_text()
    alphabet = {character: i for i, character in enumerate(sorted(set(text)))}
    data = torch.tensor([alphabet[character] for character in text])

    def batch() -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(data) - args.length, (args.rows, 1))
        sequences = data[starts + torch.arange(args.length + 1)]
        return sequences[:, :-1], sequences[:, 1:]

    model = GPT(len(alphabet), args.length, args.width, heads=4, blocks=args.blocks)
    pipe = fxpipe.compile(
        model,
        stages=stages,
        loss=loss,
        microbatches=args.microbatches,
        schedule=args.schedule,
        example_inputs=((batch()[0],), {}),
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    if rank == 0:
        print(pipe.report())

    bubbles = []
    for step in range(1, args.steps + 1):
        x, y = batch()
        began = time.perf_counter()
        with pipe.timed() as timelines:
            result = pipe.step(x, target=y)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        pipe.zero_grad()
        tokens_per_s = x.numel() / (time.perf_counter() - began)
        bubbles.append(timelines[0].bubble)
        if rank == 0:
            print(
                f"step {step:3}  loss {result.loss:.3f}  {tokens_per_s:6.0f} tokens/s  "
                f"idle {bubbles[-1]:.1%}",
                flush=True,
            )

    if rank == 0 and bubbles:
        measured = statistics.median(bubbles)
        print(f"\nbubble: predicted {pipe.simulate().bubble:.1%}, measured {measured:.1%}")
        print(f"({conditions()})")


if __name__ == "__main__":
    main()

"""Which real models compile, and whether their pipelines compute what the models do.

::

    python examples/benchmarks/model_zoo.py                       # all that are installed
    python examples/benchmarks/model_zoo.py --only resnet18 llama
    python examples/benchmarks/model_zoo.py --family hf-moe --again
    python examples/benchmarks/model_zoo.py --shard 0/4           # every fourth

Models of torchvision, transformers and timm, with random weights and small inputs. Each is compiled
for four stages and runs one step of two microbatches, in one process, beside the plain model on the
same microbatches: outputs, loss, every gradient and every buffer are compared bit for bit.

Every model runs in a process of its own, with a limit on its time and memory. Results are added to
a file, one line a model; models in it are not run again unless asked to. The table is written from
all of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import zoo
from zoo.measure import measure_apart
from zoo.result import append, read, table

SAMPLE = (
    ("tv-cls", "resnet18"),
    ("tv-cls", "mobilenet_v3_small"),
    ("tv-cls", "googlenet"),
    ("tv-cls", "shufflenet_v2_x0_5"),
    ("tv-seg", "lraspp_mobilenet_v3_large"),
    ("hf-decoder", "gpt2"),
    ("hf-decoder", "llama"),
    ("hf-encoder", "bert"),
    ("hf-seq2seq", "bart"),
    ("hf-moe", "mixtral+batched_mm"),
    ("timm", "convnext_atto"),
    ("timm", "vit_tiny_patch16_224"),
)
"""A model of most kinds; all of them in a minute or two."""


def shard(text: str) -> tuple[int, int]:
    """``"1/4"`` -> (1, 4)."""
    index, count = map(int, text.split("/"))
    if not 0 <= index < count:
        raise ValueError(text)
    return index, count


def chosen(args: argparse.Namespace) -> list[zoo.Entry]:
    entries = zoo.corpus(args.library)
    if args.only:
        entries = [e for e in entries if e.name in args.only]
    if args.family:
        entries = [e for e in entries if e.family in args.family]
    if args.sample:
        entries = [e for e in entries if (e.family, e.name) in SAMPLE]
    index, count = args.shard
    return entries[index::count]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    libraries = tuple(zoo.LIBRARIES)
    add("--library", nargs="+", choices=libraries, default=libraries, help="run their models")
    add("--only", nargs="+", metavar="NAME", help="run these models")
    add("--family", nargs="+", metavar="FAMILY", help="run these families")
    add("--sample", action="store_true", help="run one model of most kinds")
    add("--shard", type=shard, default=(0, 1), metavar="I/N", help="run every N-th, from the I-th")
    add("--again", action="store_true", help="run models whose result is known too")
    add("--list", action="store_true", help="print the models, run none")
    add("--limit-s", type=float, default=120, help="seconds a model may take")
    add("--memory-gib", type=float, default=16, help="address space a model may take")
    add("--results", type=Path, default=Path("model_zoo.jsonl"), help="read and added to")
    add("--table", type=Path, help="write the table of all results here")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    entries = chosen(args)
    if args.list:
        print("\n".join(f"{e.family}  {e.name}" for e in entries))
        return
    known = {} if args.again else read(args.results)
    entries = [e for e in entries if (e.family, e.name) not in known]
    for i, entry in enumerate(entries):
        memory_bytes = int(args.memory_gib * 2**30)
        result = measure_apart(entry, limit_s=args.limit_s, memory_bytes=memory_bytes)
        append(args.results, result)
        print(f"{i + 1}/{len(entries)}  {entry.family}  {entry.name}: {result.verdict}", flush=True)
    if args.table is not None:
        results = read(args.results)
        order = [(e.family, e.name) for e in zoo.corpus()]
        args.table.write_text(table([results[key] for key in order if key in results]))


if __name__ == "__main__":
    main()

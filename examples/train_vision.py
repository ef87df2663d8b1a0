"""Trains torchvision's ResNet-18 on scikit-learn's digits, as a pipeline and with the plain loop.

    torchrun --nproc-per-node 2 examples/train_vision.py   # one stage a process
    python examples/train_vision.py                        # 4 stages, all in this process

Both start from the same weights and see the same microbatches, so they end at the same weights.
"""

import argparse
import copy
import os
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim import SGD
from torchvision.models import resnet18

import fxpipe


def digits(size: int) -> tuple[Tensor, Tensor]:
    """1797 handwritten digits as color images of size x size, shuffled, and what they show."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    images = F.interpolate(images, size=(size, size), mode="bilinear").expand(-1, 3, -1, -1)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order], torch.tensor(found.target)[order]


def accuracy(logits: Tensor, target: Tensor) -> float:
    return (logits.argmax(1) == target).float().mean().item()


def train_plain(
    model: nn.Module, batches: Iterator[tuple[Tensor, Tensor]], microbatches: int
) -> None:
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9)
    for x, y in batches:
        pieces = zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True)
        for x_m, y_m in pieces:
            loss = F.cross_entropy(model(x_m), y_m)
            (loss * (len(x_m) / len(x))).backward()  # pieces may differ by a row
        optimizer.step()
        optimizer.zero_grad()


def train_pipeline(pipe: fxpipe.Pipeline, batches: Iterator[tuple[Tensor, Tensor]]) -> None:
    optimizer = SGD(pipe.parameters(), lr=0.02, momentum=0.9)
    for x, y in batches:
        pipe.step(x, target=y)
        optimizer.step()
        pipe.zero_grad()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--images", type=int, default=1437, help="to train on, at most 1437")
    parser.add_argument("--size", type=int, default=32, help="height and width of an image")
    parser.add_argument("--rows", type=int, default=64, help="images in a batch")
    parser.add_argument("--microbatches", type=int, default=4)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # every rank builds the same model
    stages, rank = int(os.environ.get("WORLD_SIZE", "4")), int(os.environ.get("RANK", "0"))

    images, labels = digits(args.size)
    test_x, test_y = images[1437:], labels[1437:]
    train_x, train_y = images[:1437][: args.images], labels[:1437][: args.images]

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(args.epochs):
            yield from zip(train_x.split(args.rows), train_y.split(args.rows), strict=True)

    model = resnet18(weights=None, num_classes=10)
    plain = copy.deepcopy(model)  # a pipeline trains the parameters of the model it was given
    pipe = fxpipe.compile(
        model,
        stages=stages,
        loss=F.cross_entropy,
        microbatches=args.microbatches,
        example_inputs=((train_x[: args.rows],), {}),
    )
    if rank == 0:
        print(pipe.report())

    train_pipeline(pipe, batches())
    logits = pipe.eval()(test_x)  # on the rank of the last stage, None on the others
    state = pipe.full_state_dict()
    if logits is None:
        return

    train_plain(plain, batches(), args.microbatches)
    different = [n for n, t in plain.state_dict().items() if not torch.equal(t, state[n])]
    print(f"pipeline:   accuracy {accuracy(logits, test_y):.2%}")
    print(f"plain loop: accuracy {accuracy(plain.eval()(test_x), test_y):.2%}")
    print(f"parameters and buffers that differ in any bit: {len(different)} of {len(state)}")


if __name__ == "__main__":
    main()

"""Small models whose scripts are tried, and batches for them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(4, 8)
        self.narrow = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(F.relu(self.wide(x)))


class Skip(nn.Module):
    """A skip edge, a mask that crosses, a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.third = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor, *, weight: Tensor) -> Tensor:
        a = self.first(x)
        keep = a > 0
        b = self.second(a)
        c = self.third(b) * self.scale + a
        return torch.where(keep, c, 0.1 * c) * weight[:, None]


class Written(nn.Module):
    """A value that another stage writes in place, and a size that another stage computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        columns = a.t().reshape(3, -1).shape[1]
        b = a + 1
        c = self.second(b.clone())
        b.mul_(2)
        return (b * c).reshape(3, columns).t()[: x.shape[0]]


class Tied(nn.Module):
    """One matrix as embedding and as head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.inner = nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.embed(ids))))


class Normed(nn.Module):
    """Buffers, an image in channels-last order, and an output in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, image: Tensor) -> dict[str, Any]:
        self.calls += 1
        x = F.relu(self.norm(self.conv(image)))
        pooled = x.mean((2, 3))
        return {"logits": self.head(pooled), "parts": [pooled.sum(1), pooled.square().mean()]}


@dataclasses.dataclass
class Case:
    """A model with a batch, a loss, and how it is compiled."""

    model: Callable[[], nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    loss: Callable[[Any, Any], Tensor]
    options: dict[str, Any]


def cases() -> dict[str, Case]:
    """Every case has microbatches of two sizes."""
    draw = torch.Generator().manual_seed(0)

    def floats(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    def numbers(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=draw)

    image = floats(7, 2, 4, 4).to(memory_format=torch.channels_last)
    labels = {"label": numbers(3, 7), "weight": floats(7)}
    return {
        "skip": Case(
            Skip,
            (floats(10, 6),),
            {"weight": floats(10)},
            floats(10, 6),
            lambda output, target: F.mse_loss(output, target),
            {"stages": 4, "microbatches": 4},
        ),
        "written": Case(
            Written,
            (floats(7, 6),),
            {},
            floats(7, 3),
            lambda output, target: F.mse_loss(output, target),
            {"stages": 2, "microbatches": 3, "cuts": ["second"]},
        ),
        "tied": Case(
            Tied,
            (numbers(7, 5, 3),),
            {},
            numbers(7, 5, 3),
            lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()),
            {"stages": 3, "microbatches": 3},
        ),
        "normed": Case(
            Normed,
            (image,),
            {},
            labels,
            lambda output, target: (
                F.cross_entropy(output["logits"], target["label"])
                + (output["parts"][0] * target["weight"]).mean()
                + output["parts"][1]
            ),
            {"stages": 2, "microbatches": 3, "schedule": "GPipe", "loss_reduction": "sum"},
        ),
    }

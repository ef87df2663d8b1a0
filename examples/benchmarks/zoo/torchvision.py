"""Every model of torchvision but the quantized ones, on the smallest images that it takes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision import models

from zoo.case import ROWS, Case, Entry

CLASSES = 1000

IMAGE = 64
IMAGES = {
    # its second head needs 5 x 5 pixels after three reductions
    "inception_v3": 299,
    # windows of 7 at a quarter, an eighth, ... of the image
    "maxvit_t": 224,
    # one token a patch of 14
    "vit_h_14": 56,
}
CLASSIFIERS: dict[str, dict[str, Any]] = {
    # the initialization they ask for takes long
    "googlenet": {"init_weights": False},
    "inception_v3": {"init_weights": False},
    "vit_b_16": {"image_size": IMAGE},
    "vit_b_32": {"image_size": IMAGE},
    "vit_l_16": {"image_size": IMAGE},
    "vit_l_32": {"image_size": IMAGE},
    "vit_h_14": {"image_size": IMAGES["vit_h_14"]},
}
"""What the constructors need besides ``weights=None``."""

VIDEOS = {
    "s3d": 224,  # pools 7 x 7 pixels after five reductions
    # positions are learned for this size alone
    "mvit_v1_b": 224,
    "mvit_v2_s": 224,
}
FEW_ROWS = {"mvit_v1_b", "mvit_v2_s"}
"""Slow, and without BatchNorm: one row a microbatch is enough."""

ON_META = {"convnext_large", "vit_l_16", "vit_l_32", "vit_h_14"}
"""More than 150 million parameters."""

LEFT_OUT = {
    # 644 million parameters, and its constructor reads values: it cannot be built without them
    "regnet_y_128gf",
}


def classify(output: Tensor | tuple[Tensor, ...], target: Tensor) -> Tensor:
    """Cross entropy of one head, or of several, added."""
    heads = (output,) if isinstance(output, Tensor) else output
    return torch.stack([F.cross_entropy(head, target) for head in heads if head is not None]).sum()


def label_pixels(output: dict[str, Tensor], target: Tensor) -> Tensor:
    """Cross entropy of every pixel, over all heads."""
    return torch.stack([F.cross_entropy(head, target) for head in output.values()]).sum()


def end_point_error(output: Sequence[Tensor], target: Tensor) -> Tensor:
    """Mean distance of every estimate of a flow."""
    return torch.stack([F.l1_loss(flow, target) for flow in output]).sum()


def add_losses(output: dict[str, Tensor], target: object) -> Tensor:
    """The losses that a detector computes from its own targets."""
    return torch.stack(list(output.values())).sum()


def classifier(name: str) -> Case:
    size = IMAGES.get(name, IMAGE)
    return Case(
        models.get_model(name, weights=None, **CLASSIFIERS.get(name, {})),
        (torch.randn(ROWS, 3, size, size),),
        target=torch.randint(CLASSES, (ROWS,)),
        loss=classify,
    )


def segmenter(name: str) -> Case:
    classes = 21
    model = models.get_model(name, weights=None, weights_backbone=None, num_classes=classes)
    images = torch.randn(ROWS, 3, IMAGE, IMAGE)
    return Case(
        model, (images,), target=torch.randint(classes, (ROWS, IMAGE, IMAGE)), loss=label_pixels
    )


def video(name: str) -> Case:
    size = VIDEOS.get(name, IMAGE)
    rows = 2 if name in FEW_ROWS else ROWS
    return Case(
        models.get_model(name, weights=None),
        (torch.randn(rows, 3, 16, size, size),),
        target=torch.randint(400, (rows,)),
        loss=classify,
    )


def flow(name: str) -> Case:
    size = 128  # four levels of correlations between pixels at an eighth of it
    first, second = torch.rand(2, ROWS, 3, size, size) * 2 - 1
    return Case(
        models.get_model(name, weights=None),
        (first, second),
        {"num_flow_updates": 3},
        target=torch.randn(ROWS, 2, size, size),
        loss=end_point_error,
    )


def detector(name: str) -> Case:
    found = {"boxes": torch.tensor([[8.0, 8.0, 40.0, 40.0]]), "labels": torch.tensor([1])}
    if name.startswith("maskrcnn"):
        found["masks"] = torch.ones(1, IMAGE, IMAGE, dtype=torch.uint8)
    if name.startswith("keypointrcnn"):
        found["keypoints"] = torch.ones(1, 17, 3)
    return Case(
        models.get_model(name, weights=None, weights_backbone=None),
        (torch.rand(ROWS, 3, IMAGE, IMAGE), [found] * ROWS),
        loss=add_losses,
        batch_dims={"targets": None},  # a list, which cannot be cut
    )


def entries(family: str, module: Any, build: Callable[[str], Case]) -> list[Entry]:
    return [
        Entry(family, name, functools.partial(build, name), on_meta=name in ON_META)
        for name in models.list_models(module=module)
        if name not in LEFT_OUT
    ]


ENTRIES = [
    *entries("tv-cls", models, classifier),
    *entries("tv-seg", models.segmentation, segmenter),
    *entries("tv-video", models.video, video),
    *entries("tv-flow", models.optical_flow, flow),
    *entries("tv-det", models.detection, detector),
]

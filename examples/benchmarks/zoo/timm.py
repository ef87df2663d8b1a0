"""Small models of timm, one or two of every kind, on the smallest images that they take."""

from __future__ import annotations

import functools

import timm
import torch
import torch.nn.functional as F

from zoo.case import ROWS, Case, Entry

CLASSES = 1000

ANY_SIZE = {
    "convnext_atto": 64,
    "convnextv2_atto": 64,
    "efficientnet_b0": 64,
    "tf_efficientnetv2_b0": 64,
    "mobilenetv3_small_050": 64,
    "resnet18": 64,
    "seresnet50": 64,
    "resnetv2_50": 64,
    "ecaresnet26t": 64,
    "regnety_002": 64,
    "poolformer_s12": 64,
    "mobilevit_xxs": 64,
    "edgenext_xx_small": 64,
    "hrnet_w18_small": 64,
    "nfnet_l0": 64,
    "xcit_nano_12_p16_224": 64,
    "pvt_v2_b0": 64,
    "davit_tiny": 64,
}
"""Height and width of the images."""

BUILT_FOR = {
    "beit_base_patch16_224": 64,
    "swin_tiny_patch4_window7_224": 224,
    "swinv2_cr_tiny_224": 224,
    "mixer_s32_224": 64,
    "maxvit_rmlp_pico_rw_256": 64,
    "coatnet_pico_rw_224": 64,
    "levit_128s": 64,
    "cait_xxs24_224": 64,
    "hiera_tiny_224": 64,
    "vit_tiny_patch16_224": 64,
    "deit_tiny_distilled_patch16_224": 64,
    "eva02_tiny_patch14_224": 56,
    "vit_so150m_patch16_reg4_gap_256": 64,
}
"""The same, for models whose tables depend on it."""


def image_model(name: str, size: int, *, is_built_for_it: bool) -> Case:
    options = {"img_size": size} if is_built_for_it else {}
    return Case(
        timm.create_model(name, pretrained=False, num_classes=CLASSES, **options),
        (torch.randn(ROWS, 3, size, size),),
        target=torch.randint(CLASSES, (ROWS,)),
        loss=F.cross_entropy,
    )


ENTRIES = [
    Entry("timm", name, functools.partial(image_model, name, size, is_built_for_it=is_built_for_it))
    for sizes, is_built_for_it in ((ANY_SIZE, False), (BUILT_FOR, True))
    for name, size in sizes.items()
]

"""Architectures of transformers, made from tiny random configs: nothing is downloaded."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

# both are read at import
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from transformers import AutoConfig

from zoo.case import ROWS, Case, Entry
from zoo.tiny_configs import (
    DECODERS,
    ENCODER_DECODERS,
    ENCODERS,
    GROUPED,
    HALVES,
    IMAGE,
    IMAGE_MODELS,
    LABELS,
    LENGTH,
    MIXTURES,
    PATCHES,
    SPECIAL_TOKENS,
    STATE_SPACES,
    TINY,
    Config,
)


def make(model_type: str, config: Config, head: type, **how: Any) -> torch.nn.Module:
    """A model in train mode.

    Args:
        model_type: its name in transformers.
        config: on top of `TINY`.
        head: the auto class that knows its task.
        how: which implementation of attention or experts.
    """
    made = AutoConfig.for_model(model_type, **{**TINY, **config})
    return head.from_config(made, **how).train()


def tokens() -> torch.Tensor:
    return torch.randint(SPECIAL_TOKENS, TINY["vocab_size"], (ROWS, LENGTH))


def padding() -> torch.Tensor:
    """A mask with another number of tokens in every row."""
    return (torch.arange(LENGTH) < torch.arange(LENGTH, LENGTH - ROWS, -1)[:, None]).long()


def text_model(
    model_type: str, config: Config, head: type, *, is_padded: bool = False, **how: Any
) -> Case:
    text = tokens()
    inputs = {"input_ids": text, "labels": text}
    if is_padded:
        inputs["attention_mask"] = padding()
    return Case(make(model_type, config, head, **how), kwargs=inputs)


def image_model(model_type: str) -> Case:
    images = torch.randn(ROWS, 3, IMAGE, IMAGE)
    inputs = {"pixel_values": images, "labels": torch.randint(LABELS, (ROWS,))}
    head = transformers.AutoModelForImageClassification
    return Case(make(model_type, IMAGE_MODELS[model_type], head), kwargs=inputs)


def speech(model_type: str) -> Case:
    config = {
        "conv_dim": (16, 16),
        "conv_stride": (5, 2),
        "conv_kernel": (10, 3),
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
        "classifier_proj_size": 16,
        # what is masked is drawn by NumPy, and which layers are left out in Python
        "apply_spec_augment": False,
        "layerdrop": 0.0,
    }
    sound = {"input_values": torch.randn(ROWS, 800), "labels": torch.randint(LABELS, (ROWS,))}
    head = transformers.AutoModelForAudioClassification
    return Case(make(model_type, config, head), kwargs=sound)


def whisper() -> Case:
    config = {**HALVES, "max_source_positions": LENGTH, "max_target_positions": 64}
    model = make("whisper", config, transformers.AutoModelForSpeechSeq2Seq)
    features = torch.randn(ROWS, model.config.num_mel_bins, 2 * LENGTH)
    return Case(model, kwargs={"input_features": features, "labels": tokens()})


def two_towers(model_type: str) -> Case:
    """Text and image, each through an encoder of its own, compared within a microbatch."""
    config = {"text_config": dict(TINY), "vision_config": {**TINY, **PATCHES}, "projection_dim": 32}
    images = torch.randn(ROWS, 3, IMAGE, IMAGE)
    inputs = {"input_ids": tokens(), "pixel_values": images, "return_loss": True}
    return Case(make(model_type, config, transformers.AutoModel), kwargs=inputs)


def llava() -> Case:
    image_token = TINY["vocab_size"] - 1
    config = {
        "text_config": {"model_type": "llama", **TINY, **GROUPED},
        "vision_config": {"model_type": "clip_vision_model", **TINY, **PATCHES},
        "image_token_index": image_token,
    }
    patches = (IMAGE // PATCHES["patch_size"]) ** 2
    text = torch.randint(SPECIAL_TOKENS, image_token, (ROWS, patches + LENGTH))
    text[:, :patches] = image_token
    inputs = {"input_ids": text, "pixel_values": torch.randn(ROWS, 3, IMAGE, IMAGE), "labels": text}
    return Case(make("llava", config, transformers.AutoModelForImageTextToText), kwargs=inputs)


def each(family: str, names: Iterable[str], build: Callable[[str], Case]) -> list[Entry]:
    return [Entry(family, name, functools.partial(build, name)) for name in names]


def texts(family: str, configs: Mapping[str, Config], head: type) -> list[Entry]:
    return [
        Entry(family, name, functools.partial(text_model, name, config, head))
        for name, config in configs.items()
    ]


def variant(name: str, family: str, how: str, **options: Any) -> Entry:
    """A model of this file once more, in another way."""
    config = {**DECODERS, **MIXTURES}[name]
    build = functools.partial(text_model, name, config, CAUSAL, **options)
    return Entry(family, f"{name}+{how}", build)


CAUSAL = transformers.AutoModelForCausalLM
SPEECH = ("wav2vec2", "hubert", "unispeech", "unispeech-sat", "wavlm", "data2vec-audio", "sew")

ENTRIES = [
    *texts("hf-decoder", DECODERS, CAUSAL),
    variant("gpt2", "hf-decoder", "mask", is_padded=True),
    variant("llama", "hf-decoder", "mask", is_padded=True),
    variant("llama", "hf-decoder", "eager_attention", attn_implementation="eager"),
    *texts("hf-moe", MIXTURES, CAUSAL),
    variant("mixtral", "hf-moe", "batched_mm", experts_implementation="batched_mm"),
    variant("mixtral", "hf-moe", "eager_experts", experts_implementation="eager"),
    *texts("hf-ssm", STATE_SPACES, CAUSAL),
    *texts("hf-encoder", ENCODERS, transformers.AutoModelForMaskedLM),
    *texts("hf-seq2seq", ENCODER_DECODERS, transformers.AutoModelForSeq2SeqLM),
    Entry("hf-seq2seq", "whisper", whisper),
    *each("hf-audio", SPEECH, speech),
    *each("hf-vision", IMAGE_MODELS, image_model),
    *each("hf-multimodal", ("clip", "siglip"), two_towers),
    Entry("hf-multimodal", "llava", llava),
]

"""Configs of transformers' architectures, tiny.

Every config takes the sizes it knows from one common dictionary; what stands beside a name is what
its architecture calls otherwise, or needs besides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]

LENGTH, IMAGE, LABELS = 16, 32, 10
SPECIAL_TOKENS = 3

TINY: Config = {
    "vocab_size": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 64,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "num_labels": LABELS,
    "use_cache": False,
}
GROUPED: Config = {"num_key_value_heads": 2, "head_dim": 16}
EXPERTS: Config = {
    **GROUPED,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
LATENT: Config = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
HALVES: Config = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "decoder_start_token_id": 2,
    # which layers are left out is drawn in Python, while a step runs
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}
SCANS: Config = {
    **EXPERTS,
    "mamba_d_ssm": 128,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
# else their first forward makes another kind of attention, and draws its first weights
FULL_ATTENTION: Config = {"attention_type": "original_full"}
PATCHES: Config = {"image_size": IMAGE, "patch_size": 8}


def alike(config: Config, *names: str) -> dict[str, Config]:
    """The same for each name. What an architecture does not know, it leaves alone."""
    return dict.fromkeys(names, config)


DECODERS: dict[str, Config] = {
    "gpt2": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "gptj": {"rotary_dim": 8},
    "gpt_neox": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "bloom": {},
    "falcon": {},
    "mpt": {},
    "llama": GROUPED,
    "mistral": GROUPED,
    "qwen2": GROUPED,
    "qwen3": GROUPED,
    "gemma": GROUPED,
    "gemma2": GROUPED,
    "gemma3_text": GROUPED,
    "phi": {},
    "phi3": GROUPED,
    "olmo2": GROUPED,
    "starcoder2": GROUPED,
    "stablelm": GROUPED,
    "cohere": GROUPED,
    "granite": GROUPED,
    "smollm3": GROUPED,
    "glm4": GROUPED,
    "qwen3_next": {
        **EXPERTS,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    **alike(
        EXPERTS,
        "gpt_bigcode",
        "xglm",
        "persimmon",
        "nemotron",
        "olmo",
        "olmo3",
        "cohere2",
        "exaone4",
        "ernie4_5",
        "helium",
        "seed_oss",
        "hunyuan_v1_dense",
        "arcee",
        "ministral",
        "lfm2",
        "ctrl",
        "biogpt",
        "openai-gpt",
        "glm",
        "bitnet",
        "apertus",
        "diffllama",
        "nanochat",
        "doge",
        "vaultgemma",
    ),
}
MIXTURES: dict[str, Config] = {
    "mixtral": EXPERTS,
    "qwen2_moe": EXPERTS,
    "qwen3_moe": EXPERTS,
    "olmoe": EXPERTS,
    "gpt_oss": EXPERTS,
    "granitemoe": EXPERTS,
    "deepseek_v2": {**EXPERTS, **LATENT},
    "deepseek_v3": {**EXPERTS, **LATENT},
    "granitemoehybrid": SCANS,
    **alike(
        EXPERTS,
        "jamba",
        "phimoe",
        "jetmoe",
        "glm4_moe",
        "minimax",
        "flex_olmo",
        "ernie4_5_moe",
        "hunyuan_v1_moe",
    ),
}
STATE_SPACES: dict[str, Config] = {
    "mamba": {"state_size": 8},
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 8},
    "rwkv": {"attention_hidden_size": 64, "context_length": 64},
    "bamba": SCANS,
    "falcon_h1": SCANS,
    **alike(
        EXPERTS,
        "falcon_mamba",
        "recurrent_gemma",
    ),
}
ENCODERS: dict[str, Config] = {
    "bert": {},
    "roberta": {},
    "distilbert": {"hidden_dim": 96},
    "electra": {"embedding_size": 64},
    "albert": {"embedding_size": 32},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "modernbert": {"local_attention": 8, "cls_token_id": 1, "sep_token_id": 2},
    "big_bird": FULL_ATTENTION,
    **alike(
        {},
        "camembert",
        "mpnet",
        "roformer",
        "ernie",
        "convbert",
        "megatron-bert",
        "deberta",
        "esm",
        "fnet",
        "nystromformer",
        "longformer",
        "eurobert",
        "yoso",
        "mra",
        "layoutlm",
        "xlm",
        "rembert",
        "ibert",
    ),
}
ENCODER_DECODERS: dict[str, Config] = {
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 3, "decoder_start_token_id": 0},
    "bart": HALVES,
    "marian": HALVES,
    "bigbird_pegasus": {**HALVES, **FULL_ATTENTION},
    **alike(
        {**HALVES, "d_kv": 16, "d_ff": 96, "num_layers": 2},
        "mbart",
        "pegasus",
        "m2m_100",
        "blenderbot-small",
        "led",
        "longt5",
        "mt5",
        "umt5",
        "switch_transformers",
        "fsmt",
        "plbart",
    ),
}
IMAGE_MODELS: dict[str, Config] = {
    "vit": PATCHES,
    "deit": {**PATCHES, "architectures": ["DeiTForImageClassification"]},  # it has two heads
    "dinov2": PATCHES,
    "beit": PATCHES,
    "swin": {
        **PATCHES,
        "patch_size": 2,
        "window_size": 4,
        "embed_dim": 16,
        "depths": [2, 2],
        "num_attention_heads": [2, 4],
    },
    "convnext": {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 2, 1]},
    "resnet": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2]},
    "segformer": {
        "hidden_sizes": [16, 32, 32, 64],
        "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 2, 2, 4],
        "decoder_hidden_size": 32,
    },
    **alike(
        PATCHES,
        "mobilenet_v1",
        "mobilenet_v2",
        "mobilevit",
        "data2vec-vision",
        "vit_msn",
        "swiftformer",
        "dinov2_with_registers",
        "ijepa",
    ),
}

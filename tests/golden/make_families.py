"""Make a very small checkpoint of every MoE family that transformers and mlx-lm both have.

python tests/golden/make_families.py [NAME ...]      needs the extra `golden` (torch)

Each becomes tests/golden/families/NAME: config.json and model.safetensors (bfloat16) as release 5
saves them, and reference.npz with ids (1, 12) int64 and the logits (12, vocabulary) float32 that
transformers computes with those weights in float32.

Left out: jamba (mlx-lm makes its routing weights sum to 1, transformers does not), minimax (mlx-lm
has its successor under that name), step3p5 and muse_spark (no language model alone to build).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

OUT = Path(__file__).parent / "families"
IDS = [[3, 14, 15, 9, 26, 35, 8, 41, 32, 38, 46, 27]]

# By field name; a config class takes those that it has.
TINY: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "dense_intermediate_size", "intermediate_size_mlp"), 32),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "share_expert_dim"), 32),
    **dict.fromkeys(("expert_ffn_hidden_size", "ffn_hidden_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("shared_expert_intermediate_size", "vocab_size_per_layer_input"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers"), 2),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8),
    **dict.fromkeys(("moe_num_experts",), 8),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "top_k_experts"), 3),
    **dict.fromkeys(("moe_k", "moe_topk"), 3),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "num_expert_group"), 2),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "topk_group"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "rotary_dim", "linear_head_dim"), 16),
    **dict.fromkeys(("mamba_d_head", "mamba_d_state", "mamba_head_dim", "ssm_state_size"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "index_head_dim"), 32),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("num_attention_heads", "linear_num_value_heads", "index_n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "mamba_expand"), 2),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "zero_expert_num"), 1),
    **dict.fromkeys(("mamba_d_conv", "conv_kernel"), 4),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "index_topk"), 8),
    **dict.fromkeys(("hidden_size_per_layer_input", "num_kv_shared_layers"), 0),
    **{"max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    "tie_word_embeddings": False,
}

_LINEAR_FIRST = {"layer_types": ["linear_attention", "full_attention"]}
_SLIDING_FIRST = {"layer_types": ["sliding_attention", "full_attention"]}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}

FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": _SLIDING_FIRST,
    "bailing_hybrid": {"layer_group_size": 2},
    "deepseek_v2": {"topk_method": "group_limited_greedy"},
    "deepseek_v3": {},
    "deepseek_v32": {},
    "dots1": {},
    "ernie4_5_moe": {},
    "exaone_moe": _SLIDING_FIRST,
    "gemma4": {},
    "gemma4_text": {
        "enable_moe_block": True,
        "tie_word_embeddings": True,
        "per_layer_config": {"1": {"head_dim": 32}},
        **_SLIDING_FIRST,
    },
    "glm4_moe": {},
    "glm4_moe_lite": {},
    "glm_moe_dsa": {},
    "gpt_oss": {},
    "granitemoe": {},
    "granitemoehybrid": _LINEAR_FIRST,
    "kimi_k25": {},
    "kimi_linear": {"q_lora_rank": None, **_LINEAR_FIRST},
    "laguna": {},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "tie_word_embeddings": True},
    "llama4": {},
    "llama4_text": {
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "num_hidden_layers": 4,
    },
    "longcat_flash": {},
    "mellum": {},
    "mimo_v2_flash": {
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}
            for kind, theta in (("full_attention", 50000.0), ("sliding_attention", 20000.0))
        },
    },
    "minimax_m2": {},
    "minimax_m3_vl": {},
    "mistral3": {},
    "mistral4": {},
    "mixtral": {"sliding_window": None, "head_dim": None},
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention"],
        "moe_shared_expert_intermediate_size": 32,
        "time_step_min": 1e-6,  # transformers clips time steps there, mlx-lm does not
    },
    "olmoe": {},
    "phimoe": {
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "lm_head_bias": True,
        "sliding_window": None,
    },
    "qwen2_moe": {},
    "qwen3_5_moe": {},
    "qwen3_5_moe_text": _LINEAR_FIRST,
    "qwen3_moe": {},
    "qwen3_next": _LINEAR_FIRST,
    "qwen3_vl_moe": {},
    "solar_open": {},
}

# Their norms add one to the weight, and mlx-lm rounds the sum to the checkpoint's dtype.
FLOAT32 = ("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")

# The language model inside, and what else the outer config needs.
INNER = {
    "gemma4": "gemma4_text",
    "kimi_k25": "deepseek_v3",
    "llama4": "llama4_text",
    "minimax_m3_vl": "minimax_m3_vl_text",
    "mistral3": "mistral4",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
}
VISION: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "intermediate_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "depth"), 1),
    **dict.fromkeys(("num_attention_heads", "num_heads"), 2),
    **dict.fromkeys(("out_hidden_size", "vision_output_dim", "projector_input_dim"), 32),
    **{"projector_output_dim": 32, "image_size": 28, "patch_size": 14},
    **{"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    "head_dim": 8,
}

# NAME: (family, rope settings): scaling that mlx-lm's model of the family has, or leaves out.
ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3-yarn": ("deepseek_v3", {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}),
    "glm4_moe-yarn": ("glm4_moe", {**_YARN, "partial_rotary_factor": 0.5}),
    "granitemoe-dynamic": ("granitemoe", {"rope_type": "dynamic", "factor": 2.0}),
    "olmoe-llama3": (
        "olmoe",
        {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "qwen2_moe-linear": ("qwen2_moe", {"rope_type": "linear", "factor": 2.0}),
    "qwen3_moe-yarn": ("qwen3_moe", _YARN),
}


def config_of(name: str, **more: Any) -> Any:
    """The tiny config of a family, with rope bases that are nobody's default."""
    config_class: Any = CONFIG_MAPPING[name]
    known = {key for c in config_class.__mro__ for key in getattr(c, "__annotations__", {})}
    values = {key: value for key, value in TINY.items() if key in known}
    if "kv_lora_rank" in known:
        values["num_key_value_heads"] = values["num_attention_heads"]
    values |= FAMILIES.get(name, {}) | more
    if name in INNER:
        text = config_of(INNER[name]).to_dict()
        values = {"text_config": text, "tie_word_embeddings": text["tie_word_embeddings"]}
        values |= {"projector_hidden_size": 32} if "projector_hidden_size" in known else {}
        values["vision_config"] = None if name == "gemma4" else _vision(config_class)
    config = config_class(**values)
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in [ropes] if "rope_theta" in ropes else ropes.values():
        rope["rope_theta"] = 2 * rope["rope_theta"]
    return config


def _vision(config_class: Any) -> dict[str, Any]:
    vision = config_class.sub_configs["vision_config"]
    if vision.__name__ == "AutoConfig":
        return {"model_type": "pixtral", **VISION}
    known = {key for c in vision.__mro__ for key in getattr(c, "__annotations__", {})}
    return {key: value for key, value in VISION.items() if key in known}


def build(config: Any, vision: bool) -> Any:
    """A random model of `config` whose weights bfloat16 holds exactly, computing in float32."""
    causal = not vision and type(config) in AutoModelForCausalLM._model_mapping
    auto: Any = AutoModelForCausalLM if causal else AutoModelForImageTextToText
    model = auto.from_config(config, dtype=torch.float32).eval()
    random = torch.Generator().manual_seed(0)
    ernie = config.model_type == "ernie4_5_moe"  # mlx-lm drops its correction bias
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        noise = torch.randn(tensor.shape, generator=random)
        if "correction_bias" in name or "expert_bias" in name:
            tensor.data = tensor if ernie else tensor + 0.1 * noise
        elif isinstance(tensor, torch.nn.Parameter):
            matrix = tensor.dim() >= 2
            tensor.data = noise * tensor.shape[-1] ** -0.5 if matrix else tensor + 0.1 * noise
        if isinstance(tensor, torch.nn.Parameter):
            tensor.data = tensor.data.bfloat16().float()
    return model


def make(name: str) -> None:
    """Write the checkpoint and the logits of one family."""
    family, rope = ROPES.get(name, (name, {}))
    more = {"rope_parameters": {"rope_theta": 20000.0, **rope}} if rope else {}
    model = build(config_of(family, **more), vision=name in INNER)
    text = model.language_model if name == "llama4" else model  # it forgets that there is no image
    ids = torch.tensor(IDS)
    with torch.no_grad():
        logits = text(input_ids=ids, use_cache=False).logits[0].float().numpy()
    stored = model if name in FLOAT32 else model.to(torch.bfloat16)
    stored.save_pretrained(OUT / name)
    np.savez(OUT / name / "reference.npz", ids=ids.numpy(), logits=logits)
    (OUT / name / "generation_config.json").unlink(missing_ok=True)
    size = sum(file.stat().st_size for file in (OUT / name).iterdir())
    print(f"{name:20} {size / 1e3:6.1f} KB, logits up to {abs(logits).max():.2f}")


if __name__ == "__main__":
    for wanted in sys.argv[1:] or [*FAMILIES, *ROPES]:
        if wanted != "llama4_text":  # mlx-lm reads it inside llama4 only
            make(wanted)

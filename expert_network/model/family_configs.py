"""What single families need in a config saved by transformers 5, beyond the common rules.

Each entry was checked against logits that transformers computed: docs/model-families.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Config = dict[str, Any]


def fill_constants(config: Config) -> None:
    """Add to `config` what older ones of its family write down and newer ones leave to the code."""
    family = str(config.get("model_type"))
    if family in _TYPES:
        config["model_type"] = family = _TYPES[family]
    for key, value in _CONSTANTS.get(family, {}).items():
        _fill(config, key, value)


def fill_derived(config: Config) -> None:
    """Add to a `config` that the common rules went over what its family reads in another form."""
    if derive := _DERIVED.get(str(config.get("model_type"))):
        for key, value in derive(config).items():
            _fill(config, key, value)


def _fill(config: Config, key: str, value: Any) -> None:
    if config.get(key) is None and value is not None:
        config[key] = value


# The language model alone of a larger one, under the only name by which mlx-lm knows it.
_TYPES = {"qwen3_5_moe_text": "qwen3_5_moe"}

_CONSTANTS: dict[str, Config] = {
    "gemma4_unified_text": {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    "glm_moe_dsa": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
    "kimi_linear": {"rope_theta": 10000.0},  # required, and read by no layer
    "longcat_flash": {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "minimax": {"shared_intermediate_size": 0},
    "minimax_m2": {"shared_intermediate_size": 0},
    "mimo_v2_flash": {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
    },
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
    "solar_open": {"first_k_dense_replace": 0, "partial_rotary_factor": 1.0},
}


def _deepseek_v2(config: Config) -> Config:
    # mlx-lm builds a yarn rope whatever the config says; with factor 1 it is the plain one.
    return {"rope_scaling": {"type": "yarn", "rope_type": "yarn", "factor": 1.0}}


def _bailing_hybrid(config: Config) -> Config:
    # mlx-lm has two models of this type and tells them apart by this name.
    delta = config.get("kda_lower_bound") is not None
    if delta and config.get("architectures") == ["BailingHybridForCausalLM"]:
        config["architectures"] = ["BailingMoeV3ForCausalLM"]
    shared = (config.get("moe_intermediate_size") or 0) * (config.get("num_shared_experts") or 0)
    return {"moe_shared_expert_intermediate_size": shared or None}


def _granitemoehybrid(config: Config) -> Config:
    names = {"linear_attention": "mamba", "full_attention": "attention"}
    config["layer_types"] = [names.get(kind, kind) for kind in config.get("layer_types") or []]
    # Null means no rope there, and anything but "nope" means rope to mlx-lm.
    return {"position_embedding_type": "nope"} if "position_embedding_type" in config else {}


def _kimi_linear(config: Config) -> Config:
    kinds = config.get("layer_types") or []
    numbers = {kind: [n + 1 for n, k in enumerate(kinds) if k == kind] for kind in set(kinds)}
    return {
        "linear_attn_config": {
            "kda_layers": numbers.get("linear_attention", []),
            "full_attn_layers": numbers.get("full_attention", []),
            "num_heads": config.get("linear_num_heads"),
            "head_dim": config.get("linear_head_dim"),
            "short_conv_kernel_size": config.get("linear_conv_kernel_dim"),
        }
    }


def _mimo_v2_flash(config: Config) -> Config:
    sliding = (config.get("rope_parameters") or {}).get("sliding_attention", {})
    config.setdefault("n_shared_experts", None)  # required, and none of them is allowed
    return {
        "hybrid_layer_pattern": [
            int(kind == "sliding_attention") for kind in config.get("layer_types") or []
        ],
        "moe_layer_freq": [int(moe) for moe in config.get("is_moe_layer") or []],
        "sliding_window_size": config.get("sliding_window"),
        "swa_rope_theta": sliding.get("rope_theta"),
        "swa_num_attention_heads": config.get("num_attention_heads"),
        "swa_num_key_value_heads": 2 * (config.get("num_key_value_heads") or 0) or None,
        "swa_head_dim": config.get("head_dim"),
        "swa_v_head_dim": config.get("v_head_dim"),
    }


def _minimax(config: Config) -> Config:
    factor = config.get("partial_rotary_factor") or 1.0
    return {"rotary_dim": int((config.get("head_dim") or 0) * factor)}


def _solar_open(config: Config) -> Config:
    return {"intermediate_size": config.get("moe_intermediate_size")}


def _gemma4(config: Config) -> Config:
    """Full attention's own head size, which newer configs write by layer."""
    layers = config.get("per_layer_config")
    if layers is None:
        return {}
    full: Config = next(iter(layers.values()), {})
    return {
        "global_head_dim": full.get("head_dim", config.get("head_dim")),
        "num_global_key_value_heads": full.get("num_key_value_heads"),
    }


_DERIVED: dict[str, Callable[[Config], Config]] = {
    "bailing_hybrid": _bailing_hybrid,
    "deepseek_v2": _deepseek_v2,
    "gemma4_text": _gemma4,
    "gemma4_unified_text": _gemma4,
    "granitemoehybrid": _granitemoehybrid,
    "kimi_linear": _kimi_linear,
    "mimo_v2_flash": _mimo_v2_flash,
    "minimax": _minimax,
    "minimax_m2": _minimax,
    "solar_open": _solar_open,
}

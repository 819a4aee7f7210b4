"""Every MoE family of the mlx-lm that is installed, each tiny and random.

The families are found by reading mlx-lm's modules. A tiny config comes from one table of values by
field name; OVERRIDES holds what a family needs beyond that.
"""

from __future__ import annotations

import importlib
import inspect
import re
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx_lm.models
from mlx.nn.layers.base import Module
from mlx.utils import tree_map_with_path
from mlx_lm.utils import _get_classes

Config = dict[str, Any]

LAYERS = 4
EXPERTS = 12  # no other dimension has this size: it tells routers from other matrices
TOP_K = 4
VOCAB = 128

TINY: Config = {
    # sizes
    "hidden_size": 64,
    "model_dim": 64,
    "num_hidden_layers": LAYERS,
    "num_layers": LAYERS,
    "vocab_size": VOCAB,
    "num_vocab": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "intermediate_size": 64,
    "intermediate_size_mlp": 64,
    "dense_intermediate_size": 64,
    "ffn_hidden_size": 64,
    "expert_ffn_hidden_size": 64,
    "moe_intermediate_size": 64,
    "moe_hidden_size": 64,
    "shared_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "share_expert_dim": 64,
    "max_position_embeddings": 512,
    "model_max_length": 512,
    "hidden_size_per_layer_input": 0,
    # attention
    "num_attention_heads": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "num_attention_groups": 2,
    "num_kv_shared_layers": 0,
    "head_dim": 16,
    "global_head_dim": 16,
    "rotary_dim": 16,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "sliding_window": 8,
    "sliding_window_size": 8,
    "attention_chunk_size": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "swa_v_head_dim": 16,
    "rope_theta": 10000.0,
    "swa_rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 16,
    "layer_group_size": 2,
    "group_norm_size": 1,
    "full_attention_interval": 2,
    # experts
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "num_experts_per_token": TOP_K,
    "moe_k": TOP_K,
    "moe_topk": TOP_K,
    "moe_top_k": TOP_K,
    "top_k_experts": TOP_K,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "num_shared_expert": 1,
    "n_group": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "mlp_only_layers": [],
    "zero_expert_num": 2,
    "zero_expert_type": "identity",
    # states
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "short_conv_kernel_size": 4,
    "conv_L_cache": 3,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_num_heads": 8,
    "mamba_n_heads": 8,
    "mamba_head_dim": 16,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "ssm_state_size": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    # numbers
    "rms_norm_eps": 1e-6,
    "norm_eps": 1e-6,
    "post_norm_eps": 1e-6,
    "layer_norm_epsilon": 1e-6,
    "layernorm_epsilon": 1e-6,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": 30.0,
    # switches
    "attention_bias": False,
    "use_bias": False,
    "mlp_bias": False,
    "conv_bias": False,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "use_conv_bias": True,
    "use_expert_bias": True,
    "use_qk_norm": True,
    "tie_word_embeddings": False,
    "rope_scaling": None,
}

_TWO_KINDS = ["sliding_attention", "full_attention"] * (LAYERS // 2)
_YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_KDA = {
    "kda_layers": [1, 2, 3],
    "full_attn_layers": [4],
    "num_heads": 4,
    "head_dim": 16,
    "short_conv_kernel_size": 4,
}
_BY_KIND = {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in set(_TWO_KINDS)}

OVERRIDES: dict[str, Config] = {
    "afmoe": {"layer_types": _TWO_KINDS},
    "deepseek_v2": {"rope_scaling": _YARN, "topk_method": "group_limited_greedy"},
    "exaone_moe": {"layer_types": _TWO_KINDS, "is_moe_layer": [False, True, True, True]},
    "gemma4": {"vocab_size": VOCAB},
    "gemma4_text": {"enable_moe_block": True, "layer_types": _TWO_KINDS},
    "glm_moe_dsa": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "gpt_oss": {"layer_types": _TWO_KINDS},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan": {
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0},
    },
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "kimi_k3": {
        "text_config": {
            "linear_attn_config": _KDA,
            "activation_situ_beta": 4.0,
            "activation_situ_linear_beta": 25.0,
            "routed_expert_hidden_size": 32,
        }
    },
    "kimi_linear": {"linear_attn_config": _KDA},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4": {"text_config": {"interleave_moe_layer_step": 2, "num_experts_per_tok": 1}},
    "longcat_flash": {
        "attention_method": "MLA",
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "longcat_flash_ngram": {"mla_scale_q_lora": True, "mla_scale_kv_lora": True},
    "mellum": {"layer_types": _TWO_KINDS, "rope_parameters": _BY_KIND},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 0, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
    },
    "minimax_m3_vl": {"text_config": {"moe_layer_freq": [0, 1, 1, 1]}},
    "mistral4": {"rope_parameters": _YARN},
    "muse_spark": {
        "text_config": {
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "layer_rope_theta": [10000.0, 0.0] * 2,
            "layer_types": _TWO_KINDS,
            "num_shared_experts": 0,
        }
    },
    "nemotron_h": {"hybrid_override_pattern": ["M", "E", "*", "E", "-", "E"]},
    "phimoe": {"num_experts_per_tok": 2},  # what its sparse mixer was made for
    "phixtral": {"num_experts_per_tok": TOP_K},
    "prism_hadamard_qwen35": {
        "text_config": {"hidden_size": 128},
        "tensor_namespace": "mlx-vlm-qwen3_5",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [{"path": "lm_head", "embedding": False, "dtype": "float16", "block": 0}],
    },
}

# Whose class reads the text_config, where it is not the family's own TextArgs.
TEXT_CLASS = {
    "gemma4": ("gemma4_text", "ModelArgs"),
    "kimi_k25": ("deepseek_v3", "ModelArgs"),
    "mistral3": ("mistral4", "ModelArgs"),
    "prism_hadamard_qwen35": ("qwen3_5", "TextModelArgs"),
    "qwen3_5": ("qwen3_5", "TextModelArgs"),
    "qwen3_5_moe": ("qwen3_5", "TextModelArgs"),
    "qwen3_vl_moe": ("qwen3_moe", "ModelArgs"),
}

# phimoe drops scores outside a band around the best: at most seeds bf16 moves one over its edge.
SEEDS = {"phimoe": 3}


def families() -> list[str]:
    """The module names of mlx-lm's families that can have experts, sorted."""
    sources = {path.stem: path.read_text(encoding="utf-8") for path in _folder().glob("*.py")}
    found = {name for name, text in sources.items() if re.search(r"\bSwitch(GLU|MLP)\b", text)}
    found.discard("switch_layers")
    while more := {n for n, text in sources.items() if _imports(text) & found} - found:
        found |= more
    return sorted(found)


def _folder() -> Path:
    return Path(mlx_lm.models.__path__[0])


def _imports(source: str) -> set[str]:
    """The sibling modules that a module of mlx-lm builds upon."""
    names = set(re.findall(r"^from \.(\w+) import", source, re.MULTILINE))
    for line in re.findall(r"^from \. import (.+)$", source, re.MULTILINE):
        names |= {name.strip() for name in line.split(",")}
    return names


def config(family: str) -> Config:
    """A tiny config of `family`, fit for config.json."""
    module = importlib.import_module(f"mlx_lm.models.{family}")
    tiny = _fill(module.ModelArgs) | {"model_type": family} | deepcopy(OVERRIDES.get(family, {}))
    if "text_config" in inspect.signature(module.ModelArgs).parameters:
        inner, name = TEXT_CLASS.get(family, (family, "TextArgs"))
        args = getattr(importlib.import_module(f"mlx_lm.models.{inner}"), name)
        text = _fill(args) | {"model_type": inner} | deepcopy(OVERRIDES.get(inner, {}))
        tiny["text_config"] = text | tiny.get("text_config", {})
    return tiny


def _fill(args: type) -> Config:
    return {name: TINY[name] for name in inspect.signature(args).parameters if name in TINY}


def build(family: str) -> Module:
    """A tiny model of `family` with float32 weights that are random, the same at every call."""
    mx.random.seed(SEEDS.get(family, 0))
    model_class, args_class = _get_classes(config(family))
    model = model_class(args_class.from_dict(config(family)))
    model.update(tree_map_with_path(_stir, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return cast(Module, model)


def _stir(path: str, array: mx.array) -> mx.array:
    """Give weights that start out constant a value of their own: zeros hide mistakes."""
    if not mx.issubdtype(array.dtype, mx.floating):
        return array
    noise = mx.random.normal(array.shape)
    if array.ndim < 2:
        return mx.add(array, 0.1 * noise)
    noise *= array.shape[-1] ** -0.5
    if array.ndim == 2 and array.shape[0] in (EXPERTS, EXPERTS + TINY["zero_expert_num"]):
        # A trained router is decisive; near a tie a rounded row would pick another expert.
        return 4 * noise
    return array if array.any().item() else noise

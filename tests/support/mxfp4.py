"""A tiny gpt-oss checkpoint as OpenAI publishes it: experts in mxfp4, blocks and scales apart."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np

LAYERS, EXPERTS, HIDDEN, INNER, VOCAB = 2, 4, 64, 32, 128

CONFIG = {
    "model_type": "gpt_oss",
    "num_hidden_layers": LAYERS,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "sliding_window": 8,
    "rope_theta": 150000,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    },
}


def write_gpt_oss(path: Path) -> Path:
    """Write the checkpoint and return `path`."""
    rng = np.random.default_rng(0)

    def floats(*shape: int) -> mx.array:
        return mx.array(rng.normal(0, 0.02, shape).astype(np.float32)).astype(mx.bfloat16)

    def packed(*shape: int) -> mx.array:
        return mx.array(rng.integers(0, 256, shape, dtype=np.uint8))

    def scales(*shape: int) -> mx.array:
        return mx.array(rng.integers(118, 122, shape, dtype=np.uint8))

    weights = {
        "model.embed_tokens.weight": floats(VOCAB, HIDDEN),
        "model.norm.weight": floats(HIDDEN),
        "lm_head.weight": floats(VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        for part in "qkvo":
            weights[f"{name}.self_attn.{part}_proj.weight"] = floats(HIDDEN, HIDDEN)
            weights[f"{name}.self_attn.{part}_proj.bias"] = floats(HIDDEN)
        weights[f"{name}.self_attn.sinks"] = floats(4)
        weights[f"{name}.input_layernorm.weight"] = floats(HIDDEN)
        weights[f"{name}.post_attention_layernorm.weight"] = floats(HIDDEN)
        weights[f"{name}.mlp.router.weight"] = floats(EXPERTS, HIDDEN)
        weights[f"{name}.mlp.router.bias"] = floats(EXPERTS)
        for part, rows, row in (("gate_up", 2 * INNER, HIDDEN), ("down", HIDDEN, INNER)):
            experts = f"{name}.mlp.experts.{part}_proj"
            weights[f"{experts}_blocks"] = packed(EXPERTS, rows, row // 32, 16)
            weights[f"{experts}_scales"] = scales(EXPERTS, rows, row // 32)
            weights[f"{experts}_bias"] = floats(EXPERTS, rows)
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    mx.save_safetensors(str(path / "model.safetensors"), weights)
    return path

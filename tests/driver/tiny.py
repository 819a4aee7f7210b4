"""A tiny random mixture-of-experts model, as mlx-lm builds it."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models import lfm2_moe, qwen3_moe

VOCABULARY = 48


def qwen() -> Module:
    """Two layers of four experts, whose cache can be trimmed."""
    mx.random.seed(7)
    args = cast(Any, qwen3_moe.ModelArgs).from_dict(
        dict(
            model_type="qwen3_moe",
            hidden_size=32,
            num_hidden_layers=2,
            intermediate_size=32,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            norm_topk_prob=True,
            rms_norm_eps=1e-6,
            vocab_size=VOCABULARY,
            rope_theta=10000.0,
            tie_word_embeddings=False,
            max_position_embeddings=64,
        )
    )
    return _built(qwen3_moe.Model(args))


def lfm() -> Module:
    """A hybrid: its convolution state cannot forget a token."""
    mx.random.seed(7)
    args = cast(Any, lfm2_moe.ModelArgs).from_dict(
        dict(
            model_type="lfm2_moe",
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=32,
            moe_intermediate_size=16,
            num_hidden_layers=3,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            use_expert_bias=False,
            num_dense_layers=1,
            norm_eps=1e-5,
            conv_bias=False,
            conv_L_cache=3,
            rope_theta=10000.0,
            layer_types=["conv", "full_attention", "conv"],
        )
    )
    return _built(lfm2_moe.Model(args))


def _built(model: Any) -> Module:
    mx.eval(model.parameters())
    return cast(Module, model)

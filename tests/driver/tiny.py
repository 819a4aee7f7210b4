"""A tiny random mixture-of-experts model, as mlx-lm builds it."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models import lfm2_moe, qwen3_moe

VOCABULARY = 48


def qwen(hidden: int = 32) -> Module:
    """Two layers of four experts, whose cache can be trimmed."""
    mx.random.seed(7)
    args = cast(Any, qwen3_moe.ModelArgs).from_dict(
        dict(
            model_type="qwen3_moe",
            hidden_size=hidden,
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


class Letters:
    """A tokenizer of one token a character, for conversations with a tiny model."""

    has_chat_template = True
    eos_token_ids: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        return [ord(char) % VOCABULARY for char in text]

    def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> list[int]:
        marks = {"system": 1, "user": 2, "assistant": 3}
        ids = []
        for message in messages:
            ids += [marks[message["role"]], *self.spelled(message["content"]), 4]
        return [*ids, 3]

    def spelled(self, text: str) -> list[int]:
        """The ids whose pieces make up `text`: a reply is read back as the tokens it was."""
        words = text.split()
        return (
            [int(w[1:]) for w in words] if all(w[:1] == "t" for w in words) else self.encode(text)
        )

    @property
    def detokenizer(self) -> Letters.Detokenizer:
        return Letters.Detokenizer()

    class Detokenizer:
        """Token 7 becomes "t7 "."""

        last_segment = ""

        def add_token(self, token: int) -> None:
            self.last_segment = f"t{token} "

        def finalize(self) -> None:
            self.last_segment = ""

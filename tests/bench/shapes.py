"""The dimensions of the models that are measured. Imports nothing but the standard library."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

GROUP = 64  # weights that share a scale and a bias in a store of ours; 4 bits each


@dataclass(frozen=True)
class Shape:
    """A model: `family` is "olmoe" or "qwen3_moe". Every row's length is a multiple of GROUP."""

    name: str
    family: str
    layers: int
    experts: int
    per_token: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    longest: int = 4352  # tokens

    def config(self) -> dict[str, Any]:
        """The checkpoint's config.json, as transformers writes it."""
        return {
            "model_type": self.family,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.intermediate,
            "moe_intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_experts": self.experts,
            "num_experts_per_tok": self.per_token,
            "norm_topk_prob": self.family == "qwen3_moe",
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "rms_norm_eps": 1e-5,
            "vocab_size": self.vocab,
            "rope_theta": 10000.0,
            "max_position_embeddings": self.longest,
            "tie_word_embeddings": False,
            "eos_token_id": 2,
            "torch_dtype": "bfloat16",
        }

    def cut(self, layers: int) -> Shape:
        """The same model with fewer layers, under a name that says so."""
        if layers >= self.layers:
            return self
        return replace(self, name=f"{self.name}-{layers}", layers=layers)

    def facts(self) -> dict[str, Any]:
        """The fields, for a report."""
        return asdict(self)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("olmoe", "olmoe", 16, 64, 8, 2048, 1024, 16, 16, 128, 50304),
        # Qwen3-30B-A3B has 48 layers like these.
        Shape("qwen3", "qwen3_moe", 12, 128, 8, 2048, 768, 32, 4, 128, 151936),
        Shape("tiny", "olmoe", 2, 8, 2, 128, 128, 2, 2, 64, 512),
    )
}


def shape_named(name: str) -> Shape:
    """ "olmoe", or with its first layers alone "olmoe-2". Raises KeyError for an unknown one."""
    base, _, layers = name.partition("-")
    shape = SHAPES[base]
    return shape.cut(int(layers)) if layers else shape

"""Rope scaling that mlx-lm's models leave out.

Some families (qwen2_moe, qwen3_moe, glm4_moe, mixtral) build a plain rope whatever their config
says, and none knows yarn without rounding, which gpt_oss was trained with. They would compute
something else than the model that was trained, in silence.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE
from mlx_lm.models.rope_utils import YarnRoPE, initialize_rope

Config = dict[str, Any]

_KINDS = ("linear", "dynamic", "llama3", "yarn", "longrope")


def scaled(model_class: type[Module], config: Config) -> type[Module]:
    """`model_class`, whose instances scale their ropes as the normalised `config` says."""
    text = config.get("text_config") or config
    scaling = text.get("rope_scaling") or {}
    if scaling.get("rope_type") not in _KINDS:
        return model_class

    class Scaled(model_class):  # type: ignore[misc, valid-type]
        def __init__(self, args: Any) -> None:
            super().__init__(args)
            modules = [module for _, module in self.named_modules()]
            if not any(_is_scaled(module) for module in modules):
                _scale(modules, scaling, text.get("max_position_embeddings"))
            if scaling.get("truncate") is False:
                _leave_unrounded(modules, text["rope_theta"], scaling)

    Scaled.__name__ = model_class.__name__
    return Scaled


def _is_scaled(module: Module) -> bool:
    if type(module) is RoPE:
        return bool(module.scale != 1.0)
    name = type(module).__name__.lower()
    return "rope" in name or "rotary" in name


def _scale(modules: list[Module], scaling: Config, max_position_embeddings: int | None) -> None:
    for module in modules:
        for name, rope in list(module.items()):
            if type(rope) is RoPE:
                module[name] = initialize_rope(
                    rope.dims, rope.base, rope.traditional, scaling, max_position_embeddings
                )


def _leave_unrounded(modules: list[Module], base: float, scaling: Config) -> None:
    for module in modules:
        if isinstance(module, YarnRoPE):
            module._freqs = _yarn(module.dims, base, scaling)


def _yarn(dims: int, base: float, scaling: Config) -> mx.array:
    """Yarn's wavelengths (dims / 2,), float32: stretched beyond beta_slow turns, none before
    beta_fast, and a ramp between the two that starts and ends where it will, not at whole numbers.
    """
    factor, context = scaling["factor"], scaling["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        return float(dims * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base)))

    low = max(dimension(scaling.get("beta_fast") or 32), 0)
    high = min(dimension(scaling.get("beta_slow") or 1), dims - 1)
    ramp = mx.clip((mx.arange(dims // 2) - low) / max(high - low, 0.001), 0, 1)
    plain = mx.power(base, mx.arange(0, dims, 2, dtype=mx.float32) / dims)
    return mx.reciprocal(ramp / (factor * plain) + (1 - ramp) / plain)

"""Tensors that transformers 5 saves in a form which mlx-lm's sanitize does not know yet.

Each entry takes a checkpoint's tensors by name and gives them in a form that it does know; one
that is in such a form already passes through. All is lazy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

Weights = dict[str, mx.array]

_EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


def prepared(model_class: type[Module], family: str) -> type[Module]:
    """`model_class`, its sanitize preceded by what `family` needs."""
    if family not in _PREPARE:
        return model_class
    prepare = _PREPARE[family]

    class Prepared(model_class):  # type: ignore[misc, valid-type]
        def sanitize(self, weights: Mapping[str, mx.array]) -> Any:
            return super().sanitize(prepare(dict(weights)))

    Prepared.__name__ = model_class.__name__
    return Prepared


def _bailing_hybrid(weights: Weights) -> Weights:
    """Linear attention's output projection under the name of full attention's."""
    dense = ".attention.dense.weight"

    def name_of(name: str) -> str:
        layer = name.removesuffix(dense)
        linear = name.endswith(dense) and f"{layer}.attention.A_log" in weights
        return f"{layer}.attention.o_proj.weight" if linear else name

    return {name_of(name): array for name, array in weights.items()}


def _gpt_oss(weights: Weights) -> Weights:
    """Experts that are not quantized: stored input-first, and named without "weight"."""

    def turn(name: str, array: mx.array) -> tuple[str, mx.array]:
        plain = name.endswith((".experts.gate_up_proj", ".experts.down_proj"))
        return (f"{name}.weight", array.swapaxes(-1, -2)) if plain else (name, array)

    return dict(turn(*item) for item in weights.items())


def _qwen3_vl_moe(weights: Weights) -> Weights:
    """Fused experts stored output-first, where sanitize awaits them input-first."""
    gate_up, down = ".experts.gate_up_proj", ".experts.down_proj"
    hidden = next(a.shape[-1] for n, a in weights.items() if n.endswith("embed_tokens.weight"))
    shapes = {n: a.shape for n, a in weights.items() if n.endswith((gate_up, down))}
    output_first = any(
        shape[1] != hidden if name.endswith(gate_up) else shape[2] != hidden
        for name, shape in shapes.items()
    )
    return {
        n: a.swapaxes(-1, -2) if output_first and n in shapes else a for n, a in weights.items()
    }


def _qwen3_5_moe(weights: Weights) -> Weights:
    """Experts one by one."""
    stacks: dict[str, dict[int, mx.array]] = {}
    rest = {}
    for name, array in weights.items():
        if match := _EXPERT.fullmatch(name):
            target = f"{match[1]}.switch_mlp.{match[3]}_proj.weight"
            stacks.setdefault(target, {})[int(match[2])] = array
        else:
            rest[name] = array
    return rest | {name: mx.stack([s[e] for e in sorted(s)]) for name, s in stacks.items()}


def _longcat_flash(weights: Weights) -> Weights:
    """Gate and up projections also for the experts that are the identity."""

    def whole(name: str) -> bool:
        match = _EXPERT.fullmatch(name)
        return match is None or f"{match[1]}.experts.{match[2]}.down_proj.weight" in weights

    return {name: array for name, array in weights.items() if whole(name)}


def _kimi_linear(weights: Weights) -> Weights:
    """Dense layers under the name of the sparse ones."""
    dense = re.compile(r"\.block_sparse_moe\.(gate|up|down)_proj\.weight$")
    return {dense.sub(r".mlp.\1_proj.weight", name): array for name, array in weights.items()}


def _kimi_k25(weights: Weights) -> Weights:
    """The language model's layers under the name of the vision tower's."""
    old, new = "language_model.model.blocks.", "language_model.model.layers."
    text = {name: array for name, array in weights.items() if "mm_projector" not in name}
    return {name.replace(old, new): array for name, array in text.items()}


_PREPARE: dict[str, Callable[[Weights], Weights]] = {
    "bailing_hybrid": _bailing_hybrid,
    "gpt_oss": _gpt_oss,
    "kimi_k25": _kimi_k25,
    "kimi_linear": _kimi_linear,
    "longcat_flash": _longcat_flash,
    "qwen3_5_moe": _qwen3_5_moe,
    "qwen3_vl_moe": _qwen3_vl_moe,
}

"""One token's way through a trunk layer, up to its experts, in one native call.

A layer of mlx-lm takes a hundred small steps in Python. Between experts, which have driven the
interpreter out of the processor's caches, these take 1 ms, half as long as the experts themselves.
So layers whose code is known are done in one call, with the bits that the steps give. Which code
that is, a fingerprint says: a family that changes it, and everything but a single token with a
plain cache, goes the long way.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx_lm.models.base import scaled_dot_product_attention as plainly
from mlx_lm.models.cache import KVCache

from expert_network.kernels import ops
from expert_network.model import fast
from expert_network.model.host import HostArray, Room, evaluated
from expert_network.model.native_layers import Multiplying, NativeRMSNorm, NativeRoPE
from expert_network.model.seam import Seam


@dataclass(frozen=True)
class Attention:
    """Attention with a plain cache: the names of its counts, and what is normed after q and k."""

    heads: str = "n_heads"
    key_heads: str = "n_kv_heads"
    norms: Literal["none", "of heads", "whole"] = "none"


@dataclass(frozen=True)
class Choice:
    """softmax over all experts, and of these the `top_k` largest, in ascending order or not."""

    ascending: bool


# By the fingerprints of their __call__. Layers add attention to what comes in, and to that what
# the named block makes of its norm.
LAYERS = {
    "164327696a72eee5": "mlp",  # olmoe
    "09c14950667b3c37": "mlp",  # qwen2_moe, qwen3_moe and others
    "1e582fe75f20d310": "mlp",  # dots1, ernie4_5_moe, mellum and others
    "0270e89c70b080a5": "block_sparse_moe",  # mixtral
}
ATTENTIONS = {
    "fb8ce5b210966a83": Attention(norms="whole"),  # olmoe
    "44ce354f82afe9b1": Attention(norms="of heads"),  # dots1, mellum, qwen3_moe
    "8312f72a27c01da2": Attention(),  # ernie4_5_moe, qwen2_moe
    "8fedfbff221df07c": Attention("num_heads", "num_key_value_heads"),  # mixtral
}
CHOICES = {
    "72145fc5b5d9985b": Choice(ascending=False),  # olmoe
    "8c5f0e798592b6a3": Choice(ascending=True),  # qwen3_moe
    "c2802734b9b1ba6f": Choice(ascending=True),  # mellum
}


def install(model: Any) -> None:
    """Take the short way in all layers of `model` that are known. Their parts are native."""
    classes: dict[type, type] = {}
    for module in model.modules():
        layer: Any = module
        way = _way_through(layer)
        if way is not None:
            kind = type(layer)
            made = classes.setdefault(kind, type(f"Short{kind.__name__}", (_Short, kind), {}))
            layer.way, layer.__class__ = way, made


class _Short(Module):
    way: Way

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
        made = self.way.take(x, mask, cache)
        return super().__call__(x, mask, cache) if made is None else made


class Way:
    """A layer's way for one token.

    block: what follows attention; with `seam`, whose experts are asked, the choice is made here.
    """

    def __init__(self, native: object, hidden: int, block: Any, seam: Seam | None) -> None:
        self._native, self._hidden, self._block, self._seam = native, hidden, block, seam

    def take(self, x: mx.array, mask: Any, cache: Any) -> HostArray | None:
        """What the layer makes of x (1, 1, D); None if it has to go the long way."""
        row = x.host if type(x) is HostArray else None
        if row is None or row.size != self._hidden or mask is not None or not fast.is_running():
            return None
        room = self._room(cache)
        if room is None or row.dtype != np.float32:
            return None
        each = 0 if self._seam is None else self._block.top_k
        residual, normed = np.empty_like(row), np.empty_like(row)
        experts, shares = np.empty((1, each), np.uint32), np.empty((1, each), np.float32)
        given = np.ascontiguousarray(row), *room, cache.offset
        if not ops.step(self._native, *given, residual, normed, experts, shares):
            return None
        cache.offset += 1
        made = self._ask(normed, experts, shares) if each else self._block(HostArray.of(normed))
        return HostArray.of(residual + evaluated(made)[0].reshape(residual.shape))

    def _room(self, cache: Any) -> tuple[Room, Room] | None:
        """The memory of a plain cache that has room for one more."""
        if type(cache) is not KVCache:
            return None
        keys, values = cache.keys, cache.values
        if not isinstance(keys, Room) or not isinstance(values, Room):
            return None
        room = keys.dtype == values.dtype and keys.shape[2] > cache.offset
        return (keys, values) if room else None

    def _ask(self, normed: Any, experts: Any, shares: Any) -> mx.array:
        seam = self._seam
        assert seam is not None
        if self._block.norm_topk_prob:
            shares /= shares.sum(axis=-1, keepdims=True)
        row, ids = HostArray.of(normed.reshape(1, -1)), HostArray.of(experts)
        weights = HostArray.of(shares)
        if seam.mode == "sum":
            return seam.experts.weighted_sum(seam.layer, row, ids, weights)
        made: mx.array = (seam(row, ids) * weights[..., None]).sum(axis=-2)
        return made


# --- which layers, and what they consist of


def _way_through(layer: Any) -> Way | None:
    """The way through `layer`; None if it, or its attention, is not known or not native."""
    name = LAYERS.get(_fingerprint(type(layer)))
    attention: Any = layer.get("self_attn") if name else None
    form = ATTENTIONS.get(_fingerprint(type(attention)))
    if name is None or form is None:
        return None
    products: list[Any] = [_product(attention.get(f"{part}_proj")) for part in "qkvo"]
    norms: list[Any] = [
        _norm(layer.get(f"{part}_layernorm")) for part in ("input", "post_attention")
    ]
    normed: list[Any] = (
        [] if form.norms == "none" else [_norm(attention.get(f"{p}_norm")) for p in "qk"]
    )
    rope = attention.get("rope")
    if not all((*products, *norms, *normed)) or not isinstance(rope, NativeRoPE):
        return None
    if type(attention).__call__.__globals__.get("scaled_dot_product_attention") is not plainly:
        return None
    block = layer[name]
    seam, gate, choice = _choice(block)
    try:
        native = ops.trunk_layer(
            *(norms[0], norms[1]),
            *(products[0], products[1], products[2], products[3]),
            (normed[0], normed[1]) if normed else None,
            form.norms == "whole",
            getattr(attention, form.heads),
            getattr(attention, form.key_heads),
            attention.scale,
            (rope.dims, rope.traditional, rope.base, rope.scale),
            gate,
            block.top_k if seam is not None else 0,
            choice is not None and choice.ascending,
        )
    except ValueError:  # shapes that do not go together as in what is known
        return None
    return Way(native, attention["q_proj"].matrix.cols, block, seam)


def _choice(block: Any) -> tuple[Seam | None, Any, Choice | None]:
    """The seam of a block whose way of choosing is known, its gate and that way; or Nones."""
    choice = CHOICES.get(_fingerprint(type(block)))
    seams = [] if choice is None else [part for part in block.values() if isinstance(part, Seam)]
    gate = _product(block.get("gate")) if seams else None
    # What is beside a seam's experts, some blocks use too.
    if gate is None or len(seams) != 1 or getattr(block, "sharding_group", None) is not None:
        return None, None, None
    return seams[0], gate, choice


def _product(module: Any) -> tuple[Any, int] | None:
    return (module.matrix, module.precision) if isinstance(module, Multiplying) else None


def _norm(module: Any) -> tuple[Any, float] | None:
    return (module.factors, module.eps) if isinstance(module, NativeRMSNorm) else None


# --- fingerprints


def fingerprint(function: Callable[..., Any]) -> str:
    """A hash of what a function does as Python sees it: no names of types, comments, docstrings."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return sha256(" ".join(_words(tree)).encode()).hexdigest()[:16]


_fingerprints: dict[type, str] = {}


def _fingerprint(kind: type) -> str:
    if kind not in _fingerprints:
        _fingerprints[kind] = _fingerprint_of_call(kind)
    return _fingerprints[kind]


def _fingerprint_of_call(kind: type) -> str:
    call = vars(kind).get("__call__")
    try:
        return "" if call is None else fingerprint(call)
    except (OSError, TypeError, SyntaxError):  # no source that Python could read
        return ""


_LEFT_OUT = ("annotation", "returns", "type_comment", "kind", "type_params")


def _words(node: ast.AST) -> Iterator[str]:
    yield type(node).__name__
    for name, value in ast.iter_fields(node):
        if name in _LEFT_OUT:
            continue
        parts = value if isinstance(value, list) else [value]
        for part in parts:
            if isinstance(part, ast.AST):
                if not _is_text(part):
                    yield from _words(part)
            elif part is not None:
                yield f"{name}={part!r}"


def _is_text(node: ast.AST) -> bool:
    """A statement that is but a string: a docstring."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )

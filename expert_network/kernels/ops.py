"""Attention, norms and rope as MLX defines them, and the forms in which rows travel.

An array is any object with the buffer protocol, an mx.array included. float32 unless it says more;
"strided" ones may have any strides as long as the last axis is contiguous, all others are
C-contiguous. `out` is written. bfloat16 is given as it is or as uint16. Everything raises
ValueError, naming the argument, for what it cannot take. A row's bits depend neither on the number
of threads nor on what stands beside it, except in attention: there on how many rows of how many
heads are asked for at once.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

with suppress(ImportError):  # expert_network.kernels.available() says so
    from expert_network.kernels import _native

Buffer = Any
# A weight, or None, and eps; a Matrix and a precision.
Norm = tuple[Buffer | None, float]
Product = tuple[Any, int]


def attention(
    q: Buffer,
    k: Buffer,
    v: Buffer,
    out: Buffer,
    scale: float,
    causal: bool = False,
    mask: Buffer | None = None,
    sinks: Buffer | None = None,
) -> None:
    """softmax(q k^T scale) v for q (B, H, L, D), k (B, Hkv, S, D), v (B, Hkv, S, Dv); all strided.

    k and v are float32, float16 or bfloat16; Hkv divides H. `out` is (B, H, L, Dv). `causal`: the
    queries are the last L positions. `mask` broadcasts to (B, H, L, S), of any strides: bool (True
    is seen) or float32 (added). `sinks` (H,) are scores that take weight and have no value.
    """
    _native.attention(q, k, v, out, scale, causal, mask, sinks)


def rms_norm(x: Buffer, weight: Buffer | None, eps: float, out: Buffer) -> None:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis of x (..., D), strided.

    `weight` is (D,); `out` has x's shape and may be x.
    """
    _native.rms_norm(x, weight, eps, out)


def softmax(x: Buffer, out: Buffer) -> None:
    """exp(x - max) by its sum, over the last axis of x (..., N); `out` has its shape, may be x."""
    _native.softmax(x, out)


def rope(
    x: Buffer,
    out: Buffer,
    dims: int,
    traditional: bool,
    base: float | None,
    scale: float,
    offset: int | Buffer,
    freqs: Buffer | None = None,
) -> None:
    """Turn the first `dims` of each row of x (B, ..., T, D), strided, 3 to 5 axes.

    By (offset + t) * scale radians times base^(-2i / dims), or divided by freqs (dims / 2,). The
    offset is a number, or int32 (1,) or (B,). `traditional` pairs neighbours, else halves. `out`
    has x's shape and may be x.
    """
    _native.rope(x, out, dims, traditional, base, scale, offset, freqs)


def trunk_layer(
    before: Norm,
    after: Norm,
    query: Product,
    key: Product,
    value: Product,
    output: Product,
    norms: tuple[Norm, Norm] | None,
    whole: bool,
    heads: int,
    key_heads: int,
    scale: float,
    rope: tuple[int, bool, float, float],
    gate: Product | None,
    each: int,
    ascending: bool,
) -> object:
    """A layer for `step`: what stands before and after attention, and attention.

    Products are matrices with a precision each, norms weights (D,) or None with their eps. `norms`
    are those of queries and keys: over all heads if `whole`, else of each head. `rope` is dims,
    traditional, base and scale as in `rope`. With a gate, each of whose rows is an expert, the
    layer chooses the `each` experts of the largest shares: the largest first and the first of
    equals preferred, or, `ascending`, the largest last and the last of equals preferred.
    """
    dims, traditional, base, turned = rope
    return _native.trunk_layer(
        *(before, after, query, key, value, output, norms, whole, heads, key_heads, scale),
        *(dims, traditional, base, turned, gate, each, ascending),
    )


def step(
    layer: object,
    row: Buffer,
    keys: Buffer,
    values: Buffer,
    offset: int,
    residual: Buffer,
    normed: Buffer,
    experts: Buffer,
    shares: Buffer,
) -> bool:
    """Take one token's row (D,) through a layer of trunk_layer.

    `keys` (1, key_heads, room, depth) and `values` (..., width), both float32 or both float16, hold
    `offset` tokens and get this one's. Written are `residual` (D,), the row plus attention,
    `normed` (D,), its norm, and with a gate `experts` (each,) uint32 and their `shares` (each,),
    softmax over all experts. False if a number is not finite or too large for float16: then
    nothing of what was written counts. Bits are those of the single functions.
    """
    return _native.step(layer, row, keys, values, offset, residual, normed, experts, shares)


def encode(values: Buffer, label: str, out: Buffer) -> bool:
    """Write `values` (..., D) to `out` as `label` ("f32", "bf16", "f16", "int8") defines it.

    `out` has WireDType.row_bytes(D) bytes a row, in any shape. Whether all of it is finite.
    """
    return _native.encode(values, label, out)


def decode(raw: Buffer, label: str, out: Buffer) -> bool:
    """Write the rows `raw` to `out` (..., D); the reverse of `encode`. Whether all is finite."""
    return _native.decode(raw, label, out)


def accumulate(total: Buffer, rows: Buffer | None, raw: Buffer, label: str) -> bool:
    """Add the rows `raw` to those of `total` (N, D) that `rows` names; to all N if it is None.

    `rows` are integers, (R,). Whether all is finite: if not, `total` is as it was.
    """
    return _native.accumulate(total, rows, raw, label)

"""A trunk that works in float32 on a CPU while its matrices keep the bytes they are stored in.

MLX multiplies float32 rows with a bfloat16 matrix by casting all of it, every time, into fresh
memory: the page faults take longer than the product. Cast in pieces that the allocator reuses, a
bfloat16 matrix is nearly as fast as a float32 one (4096 x 2048, one row, one core: 30 ms whole,
11 ms in pieces, 8 ms for float32) and takes no memory worth naming.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear

# Bytes of float32 in one piece. From 1 MiB on glibc takes each piece from the kernel anew.
PIECE_BYTES = 512 * 1024
# Stored bytes up to which an array is simply kept as float32: norms, biases, the scales of small
# matrices. The 2,000 arrays of the largest models add 128 MiB at the very most.
SMALL_BYTES = 64 * 1024

# The same for what a family's own code computes with, be it a matrix: its precision would suffer.
# jamba's decays are the largest met, half a megabyte a layer.
OWN_BYTES = 4 * 1024 * 1024
_PLAIN = ("weight", "scales", "biases")

_HALF = (mx.bfloat16, mx.float16)


def is_half(array: Any) -> bool:
    """Whether this is an array in 16-bit floating point."""
    return isinstance(array, mx.array) and array.dtype in _HALF


def pieces(rows: int, row_elements: int) -> Iterator[slice]:
    """Slices that cover `rows`, each PIECE_BYTES or one row of `row_elements` float32."""
    step = max(1, PIECE_BYTES // (4 * row_elements))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def to_float32(model: Any) -> None:
    """Make `model` compute in float32, lazily and in place; large matrices stay as they are.

    Small arrays are cast for good. Linear layers and embeddings, plain or quantized, cast piece by
    piece when called, and embeddings give float32. Whatever else holds a large half-precision array
    is left to MLX's promotion: right, only slower.
    """
    classes: dict[type, type] = {}
    for module in model.modules():
        for key, value in list(module.items()):
            limit = SMALL_BYTES if key in _PLAIN else OWN_BYTES
            if is_half(value) and (value.ndim < 2 or value.nbytes <= limit):
                module[key] = value.astype(mx.float32)
        for plain, mixin in _MIXINS.items():
            # A family's own subclass keeps what it does, unless it computes in another way.
            kind = type(module)
            if isinstance(module, plain) and kind.__call__ is plain.__call__:
                made = classes.setdefault(kind, type(f"Float32{kind.__name__}", (mixin, kind), {}))
                module.__class__ = made


def _multiply(x: mx.array, weight: mx.array) -> mx.array:
    """x (..., K) times weight (N, K) transposed, the weight cast piece by piece."""
    if not is_half(weight):
        return x @ weight.T
    rows, columns = weight.shape
    products = [x @ weight[piece].astype(mx.float32).T for piece in pieces(rows, columns)]
    return mx.concatenate(products, axis=-1)


def _multiply_quantized(x: mx.array, layer: Any) -> mx.array:
    """x (..., K) times a quantized layer's matrix transposed, its scales cast piece by piece."""
    weight, scales, biases = layer["weight"], layer["scales"], layer.get("biases")
    options = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
    if not is_half(scales):
        return mx.quantized_matmul(x, weight, scales, biases, transpose=True, **options)
    products = [
        mx.quantized_matmul(
            x,
            weight[piece],
            scales[piece].astype(mx.float32),
            None if biases is None else biases[piece].astype(mx.float32),
            transpose=True,
            **options,
        )
        for piece in pieces(*scales.shape)
    ]
    return mx.concatenate(products, axis=-1)


class _Float32Linear(Module):
    def __call__(self, x: mx.array) -> mx.array:
        product = _multiply(x, self["weight"])
        return mx.add(product, self["bias"]) if "bias" in self else product


class _Float32QuantizedLinear(Module):
    def __call__(self, x: mx.array) -> mx.array:
        product = _multiply_quantized(x, self)
        return mx.add(product, self["bias"]) if "bias" in self else product


class _Float32Embedding(Module):
    def __call__(self, ids: mx.array) -> mx.array:
        rows = cast(mx.array, self["weight"][ids])
        return rows.astype(mx.float32)

    def as_linear(self, x: mx.array) -> mx.array:
        return _multiply(x, self["weight"])


class _Float32QuantizedEmbedding(Module):
    def __call__(self, ids: mx.array) -> mx.array:
        rows = cast(mx.array, super().__call__(ids))
        return rows.astype(mx.float32)

    def as_linear(self, x: mx.array) -> mx.array:
        return _multiply_quantized(x, self)


_MIXINS: dict[type[Any], type[Any]] = {
    Linear: _Float32Linear,
    QuantizedLinear: _Float32QuantizedLinear,
    Embedding: _Float32Embedding,
    QuantizedEmbedding: _Float32QuantizedEmbedding,
}

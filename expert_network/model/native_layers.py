"""Layers that the native kernels compute: what stands before a layer's class, by that class.

Each works at once: its result is there when the call returns, so that the next kernel reads it
without waiting for MLX (host.py says what a wait costs).
"""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.positional_encoding import RoPE
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear

from expert_network import kernels
from expert_network.kernels import ops
from expert_network.model.host import HostArray, rows_of
from expert_network.model.matrices import matrix_of


def mixin_for(kind: type) -> Any:
    """What to put before a layer's class: none if it computes in a way of its own.

    Its `prepare` says whether the kernels know how a module is stored, and notes what they need.
    """
    for plain, mixin in _MIXINS.items():
        if issubclass(kind, plain) and _computes_as(kind, plain):
            return mixin
    return None


def _computes_as(kind: type, plain: type) -> bool:
    """Whether `kind` is `plain` as far as calls go; upcast.py has put a class of its own before."""
    return next(
        "__call__" in vars(base) and (base is plain or base.__module__.endswith("model.upcast"))
        for base in kind.__mro__
        if "__call__" in vars(base)
    )


class Multiplying(Module):
    matrix: kernels.Matrix
    precision: int

    @staticmethod
    def prepare(module: Any) -> bool:
        if (matrix := matrix_of(module)) is None:
            return False
        module.matrix = matrix
        return True

    def multiply(self, x: mx.array) -> mx.array:
        """x (..., matrix.cols) times the transposed matrix, in float32."""
        matrix, rows = self.matrix, rows_of(x)
        out = np.empty((*rows.shape[:-1], matrix.rows), np.float32)
        shaped = rows.reshape(-1, matrix.cols), out.reshape(-1, matrix.rows)
        kernels.linear(matrix, *shaped, self.precision)
        return HostArray.of(out)


class NativeLinear(Multiplying):
    def __call__(self, x: mx.array) -> mx.array:
        return self.multiply(x)


class NativeEmbedding(Multiplying):
    def __call__(self, ids: mx.array) -> mx.array:
        rows = cast(mx.array, super().__call__(ids))
        return HostArray.of(rows_of(rows))

    def as_linear(self, x: mx.array) -> mx.array:
        return self.multiply(x)


class NativeRMSNorm(Module):
    @staticmethod
    def prepare(module: Any) -> bool:
        if module.weight.dtype != mx.float32:
            return False
        module.factors = np.asarray(module.weight)
        return True

    def __call__(self, x: mx.array) -> mx.array:
        rows = rows_of(x)
        out = np.empty(rows.shape, np.float32)
        ops.rms_norm(rows, self.factors, self.eps, out)
        return HostArray.of(out)


class NativeRoPE(Module):
    @staticmethod
    def prepare(module: Any) -> bool:
        return True

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        rows = x.host if isinstance(x, HostArray) else None
        if rows is None:
            return cast(mx.array, super().__call__(x, offset))
        out = np.empty(rows.shape, np.float32)
        angle = self.dims, self.traditional, self.base, self.scale
        ops.rope(rows, out, *angle, offset)
        return HostArray.of(out)


_MIXINS: dict[type[Any], type[Any]] = {
    Linear: NativeLinear,
    QuantizedLinear: NativeLinear,
    Embedding: NativeEmbedding,
    QuantizedEmbedding: NativeEmbedding,
    RMSNorm: NativeRMSNorm,
    RoPE: NativeRoPE,
}

"""A trunk whose linear layers and attention the native kernels compute, on the stored bytes.

Layers are replaced by type and work at once: each result is there when the call returns, so that
the next kernel reads it without waiting for MLX (host.py says what a wait costs).
"""

from __future__ import annotations

from collections.abc import Collection
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
from expert_network.model import eager, fast
from expert_network.model.host import HostArray, rows_of
from expert_network.model.matrices import matrix_of

# Matrices of fewer rows are always precise: gates, which cost nothing and decide a lot.
FEW_ROWS = 16


def install(model: Any, precise: bool, routers: Collection[int]) -> None:
    """Make `model`, whose arrays are evaluated, compute with the native kernels.

    `precise` is float32 activations, else int8 for quantized matrices; matrices with as many rows
    as `routers` says are always precise, since they choose experts. What the kernels do not know
    stays MLX's.
    """
    fast.install()
    eager.install()
    classes: dict[type, type] = {}
    for module in model.modules():
        kind = type(module)
        mixin = _mixin(kind)
        if mixin is None or not mixin.prepare(module):
            continue
        made = classes.setdefault(kind, type(f"Native{kind.__name__}", (mixin, kind), {}))
        module.__class__ = made
        if isinstance(module, _Multiplying):
            few = module.matrix.rows < FEW_ROWS or module.matrix.rows in routers
            module.precision = kernels.F32 if precise or few else kernels.INT8
    kind = type(model)
    model.precise = precise
    model.__class__ = type(f"Native{kind.__name__}", (_NativeModel, kind), {})


def _mixin(kind: type) -> Any:
    """What to put before a layer's class: none if it computes in a way of its own."""
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


class _NativeModel(Module):
    def __call__(self, *args: Any, **options: Any) -> Any:
        with fast.running(self.precise):
            return super().__call__(*args, **options)


# --- layers: each says whether the kernels know how a module is stored, and notes what they need


class _Multiplying(Module):
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


class _NativeLinear(_Multiplying):
    def __call__(self, x: mx.array) -> mx.array:
        return self.multiply(x)


class _NativeEmbedding(_Multiplying):
    def __call__(self, ids: mx.array) -> mx.array:
        rows = cast(mx.array, super().__call__(ids))
        return HostArray.of(rows_of(rows))

    def as_linear(self, x: mx.array) -> mx.array:
        return self.multiply(x)


class _NativeRMSNorm(Module):
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


class _NativeRoPE(Module):
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
    Linear: _NativeLinear,
    QuantizedLinear: _NativeLinear,
    Embedding: _NativeEmbedding,
    QuantizedEmbedding: _NativeEmbedding,
    RMSNorm: _NativeRMSNorm,
    RoPE: _NativeRoPE,
}

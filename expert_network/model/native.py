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
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear

from expert_network import kernels
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
        if (mixin := _mixin(kind)) is None or (matrix := matrix_of(module)) is None:
            continue
        few = matrix.rows < FEW_ROWS or matrix.rows in routers
        module.matrix = matrix
        module.precision = kernels.F32 if precise or few else kernels.INT8
        made = classes.setdefault(kind, type(f"Native{kind.__name__}", (mixin, kind), {}))
        module.__class__ = made
    kind = type(model)
    model.precise = precise
    model.__class__ = type(f"Native{kind.__name__}", (_NativeModel, kind), {})


def _mixin(kind: type) -> type | None:
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


def _multiply(x: mx.array, matrix: kernels.Matrix, precision: int) -> mx.array:
    """x (..., matrix.cols) times the transposed matrix, in float32."""
    rows = rows_of(x)
    out = np.empty((*rows.shape[:-1], matrix.rows), np.float32)
    kernels.linear(matrix, rows.reshape(-1, matrix.cols), out.reshape(-1, matrix.rows), precision)
    return HostArray.of(out)


class _NativeLinear(Module):
    def __call__(self, x: mx.array) -> mx.array:
        return _multiply(x, self.matrix, self.precision)


class _NativeEmbedding(Module):
    def __call__(self, ids: mx.array) -> mx.array:
        rows = cast(mx.array, super().__call__(ids))
        return HostArray.of(rows_of(rows))

    def as_linear(self, x: mx.array) -> mx.array:
        return _multiply(x, self.matrix, self.precision)


_MIXINS: dict[type[Any], type[Any]] = {
    Linear: _NativeLinear,
    QuantizedLinear: _NativeLinear,
    Embedding: _NativeEmbedding,
    QuantizedEmbedding: _NativeEmbedding,
}

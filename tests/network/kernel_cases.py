"""Weights in every format that the kernels take, beside the same weights as MLX unpacks them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from expert_network import kernels

Floats = NDArray[np.float32]

# Of the scales and biases of the formats that have them, in turn.
DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Format:
    """How a weight is stored. `dtype` is of a plain weight, or of scales and biases."""

    mode: Literal["plain", "affine", "mxfp4"]
    dtype: str = "float32"
    bits: int = 0
    group_size: int = 0

    def __str__(self) -> str:
        return "-".join(str(part) for part in (self.mode, self.bits, self.group_size, self.dtype))


PLAIN = [Format("plain", dtype) for dtype in DTYPES]
AFFINE = [
    Format("affine", DTYPES[(n + m) % 3], bits, group)
    for n, bits in enumerate((2, 3, 4, 5, 6, 8))
    for m, group in enumerate((32, 64, 128))
]
MXFP4 = Format("mxfp4", "float32", 4, 32)
QUANTIZED = [*AFFINE, MXFP4]


def raw(array: mx.array) -> NDArray[Any]:
    """MLX's memory; NumPy has no bfloat16."""
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def stored(form: Format, shape: tuple[int, ...], rng: np.random.Generator) -> list[mx.array]:
    """A random weight of `shape` (..., rows, cols) as it is stored: with scales and biases."""
    weight = mx.array(rng.normal(0, shape[-1] ** -0.5, shape).astype(np.float32))
    weight = weight.astype(getattr(mx, form.dtype))
    if form.mode == "plain":
        return [weight]
    return list(mx.quantize(weight, form.group_size, form.bits, mode=form.mode))


def matrix_of(
    form: Format, parts: list[mx.array], cols: int, bias: Floats | None = None
) -> kernels.Matrix:
    """What is stored, for the kernels."""
    return kernels.Matrix(
        *(raw(part) for part in parts),
        mode=form.mode,
        dtype=form.dtype,
        bits=form.bits,
        group_size=form.group_size,
        cols=cols,
        bias=bias,
    )


def values_of(form: Format, parts: list[mx.array]) -> NDArray[np.float64]:
    """What is stored, as MLX unpacks it."""
    weight, *scales = parts
    if form.mode == "affine":
        scale, bias = (part.astype(mx.float32) for part in scales)
        weight = mx.dequantize(weight, scale, bias, form.group_size, form.bits)
    elif form.mode == "mxfp4":
        weight = mx.dequantize(weight, scales[0], None, form.group_size, form.bits, form.mode)
    return np.array(weight.astype(mx.float32), np.float64)


def random_weight(
    form: Format, shape: tuple[int, ...], rng: np.random.Generator, bias: bool = False
) -> tuple[kernels.Matrix, NDArray[np.float64], Floats]:
    """A Matrix of `shape` (..., rows, cols), its values, and its bias, zeros if it has none."""
    parts = stored(form, shape, rng)
    added = rng.normal(size=shape[:-1]).astype(np.float32) * bias
    matrix = matrix_of(form, parts, shape[-1], added if bias else None)
    return matrix, values_of(form, parts), added


def linear(matrix: kernels.Matrix, x: Floats, precision: int = kernels.F32) -> Floats:
    """x times the matrix. What is not written is NaN."""
    out = np.full((len(x), matrix.rows), np.nan, np.float32)
    kernels.linear(matrix, x, out, precision)
    return out


def ffn(
    matrices: tuple[kernels.Matrix | None, kernels.Matrix, kernels.Matrix],
    activation: str,
    x: Floats,
    routes: list[list[int]],
    weights: Floats | None = None,
    precision: int = kernels.F32,
    parameters: tuple[float, ...] = (),
) -> Floats:
    """Each row's routes through gate, up and down. What is not written is NaN."""
    gate, up, down = matrices
    offsets = np.cumsum([0, *map(len, routes)]).astype(np.uint32)
    slots = np.array([slot for row in routes for slot in row], np.uint32)
    out = np.full((len(slots) if weights is None else len(x), down.rows), np.nan, np.float32)
    kernels.ffn(gate, up, down, activation, parameters, x, offsets, slots, weights, out, precision)
    return out


def error(is_: NDArray[Any], should: NDArray[Any]) -> float:
    """Relative, in L2; NaN anywhere is NaN."""
    return float(np.linalg.norm(is_ - should) / np.linalg.norm(should))

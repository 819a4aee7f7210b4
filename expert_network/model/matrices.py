"""The matrices of a model's layers for the native kernels: MLX's own memory, not copied."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from expert_network import kernels, large_pages

_PLAIN = {mx.float32: "float32", mx.bfloat16: "bfloat16", mx.float16: "float16"}


def matrix_of(layer: Any) -> kernels.Matrix | None:
    """The matrix of a linear layer, a switch module's projection or an embedding; None if the
    kernels do not know how it is stored.

    Its arrays are evaluated, and must not be replaced in the layer while the matrix is in use.
    """
    weight, scales = layer["weight"], layer.get("scales")
    mode: Any = "plain" if scales is None else layer.mode
    dtype = _PLAIN.get(weight.dtype if scales is None or mode == "mxfp4" else scales.dtype)
    bias = layer.get("bias")
    try:
        return kernels.Matrix(
            _memory(weight),
            None if scales is None else _memory(scales),
            None if layer.get("biases") is None else _memory(layer["biases"]),
            mode=mode,
            dtype=dtype or "float32",
            bits=0 if scales is None else layer.bits,
            group_size=0 if scales is None else layer.group_size,
            cols=weight.shape[-1] if scales is None else scales.shape[-1] * layer.group_size,
            bias=None if bias is None else _float32(bias),
        )
    except ValueError:
        return None


def _memory(array: mx.array) -> NDArray[Any]:
    """The array's own memory, on large pages from now on. NumPy has no bfloat16."""
    memory = np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
    large_pages.use(memory)
    return memory


def _float32(bias: mx.array) -> NDArray[np.float32]:
    return np.ascontiguousarray(bias.astype(mx.float32), np.float32)

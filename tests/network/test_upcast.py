from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.quantized import quantize

from expert_network.model import upcast

ROWS, COLUMNS = 2000, 128  # 1.0 MB in float32: two pieces


class Holder(Module):
    """A layer in a model."""

    def __init__(self, layer: Any) -> None:
        cast(Any, super()).__init__()
        self.layer = layer

    def __call__(self, x: mx.array) -> mx.array:
        result: mx.array = self.layer(x)
        return result


@pytest.fixture(params=["bfloat16", "float16", "affine", "mxfp4", "nvfp4"])
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def stored(layer: Any, form: str) -> Holder:
    """The layer as a checkpoint in half precision has it, quantized or not."""
    mx.random.seed(1)
    layer.set_dtype(mx.float16 if form == "float16" else mx.bfloat16)
    holder = Holder(layer)
    if form == "affine":
        quantize(holder, 32, 4)
    elif form in ("mxfp4", "nvfp4"):
        quantize(holder, mode=form)
    mx.eval(cast(Any, holder).parameters())
    return holder


def matrix(holder: Holder) -> mx.array:
    """The layer's weights in float32."""
    layer = holder.layer
    if "scales" not in layer:
        return mx.array(layer.weight.astype(mx.float32))
    half = [layer.scales, layer.get("biases")]
    scales, biases = (
        part if part is None or part.dtype == mx.uint8 else part.astype(mx.float32) for part in half
    )
    return mx.dequantize(
        layer.weight,
        scales,
        biases,
        layer.group_size,
        layer.bits,
        mode=layer.mode,
        dtype=mx.float32,
    )


def x(*shape: int) -> mx.array:
    return mx.array(np.random.default_rng(2).standard_normal(shape, dtype=np.float32))


def dtypes(layer: Any) -> dict[str, mx.Dtype]:
    return {name: array.dtype for name, array in layer.parameters().items()}


def assert_close(a: mx.array, b: mx.array) -> None:
    assert a.dtype == mx.float32
    assert a.shape == b.shape
    assert np.allclose(np.array(a), np.array(b), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, COLUMNS), (2, 3, COLUMNS), (COLUMNS,)])
def test_linear(form: str, bias: bool, shape: tuple[int, ...]) -> None:
    """A linear layer multiplies float32 rows with its stored matrix as if that were float32."""
    holder = stored(Linear(COLUMNS, ROWS, bias), form)
    expected = x(*shape) @ matrix(holder).T
    if bias:
        expected = expected + holder.layer.bias.astype(mx.float32)
    before = dtypes(holder.layer)["weight"]
    upcast.to_float32(holder)
    assert_close(holder(x(*shape)), expected)
    assert dtypes(holder.layer)["weight"] == before


def test_embedding(form: str) -> None:
    """An embedding gives float32 rows, and as a head multiplies with float32 rows."""
    holder = stored(Embedding(ROWS, COLUMNS), form)
    ids = mx.array([[3, 1999, 0]])
    rows, products = matrix(holder)[ids], x(1, 2, COLUMNS) @ matrix(holder).T
    upcast.to_float32(holder)
    given = holder(ids)
    assert given.dtype == mx.float32
    # A quantized row comes out in the precision of its scales, as it does in mlx-lm.
    assert np.allclose(np.array(given), np.array(rows), rtol=1e-2, atol=1e-2)
    assert_close(holder.layer.as_linear(x(1, 2, COLUMNS)), products)


def test_small_arrays_become_float32() -> None:
    """Norms, biases and small matrices are float32 for good; a large matrix keeps its bytes."""
    norm = stored(RMSNorm(50_000), "bfloat16")
    small = stored(Linear(64, 64), "bfloat16")
    large = stored(Linear(COLUMNS, ROWS), "bfloat16")
    for holder in (norm, small, large):
        upcast.to_float32(holder)
    assert dtypes(norm.layer) == {"weight": mx.float32}
    assert dtypes(small.layer) == {"weight": mx.float32, "bias": mx.float32}
    assert dtypes(large.layer) == {"weight": mx.bfloat16, "bias": mx.float32}


def test_float32_is_left_alone() -> None:
    """A layer that is float32 already gives the very bits that it gave."""
    holder = Holder(Linear(COLUMNS, ROWS))
    before = holder(x(3, COLUMNS))
    upcast.to_float32(holder)
    assert np.array_equal(np.array(holder(x(3, COLUMNS))), np.array(before))


def test_a_family_keeps_its_own_layer() -> None:
    """A subclass that computes in its own way goes on doing so."""

    class Doubling(Linear):
        def __call__(self, x: mx.array) -> mx.array:
            result: mx.array = super().__call__(x)
            return result * 2

    holder = stored(Doubling(COLUMNS, ROWS, False), "bfloat16")
    expected = x(1, COLUMNS) @ matrix(holder).T * 2
    upcast.to_float32(holder)
    assert_close(holder(x(1, COLUMNS)), expected)


def test_still_its_own_class() -> None:
    """Families ask with isinstance what a layer is, and are told what they were told before."""
    holder = stored(Linear(COLUMNS, ROWS), "bfloat16")
    upcast.to_float32(holder)
    assert isinstance(holder.layer, Linear)


def test_temporaries_stay_small() -> None:
    """A matrix of 134 MB is multiplied without taking half of that beside it."""
    holder = stored(Linear(2048, 32768, False), "bfloat16")
    upcast.to_float32(holder)
    rows = x(1, 2048)
    mx.eval(rows)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(holder(rows))
    assert mx.get_peak_memory() - before < 64e6


def test_pieces() -> None:
    """Pieces cover all rows in order, none above the limit unless one row is."""

    def covered(found: Iterator[slice]) -> list[tuple[int, int]]:
        return [(piece.start, piece.stop) for piece in found]

    row = upcast.PIECE_BYTES // 16  # elements of a quarter of a piece
    assert covered(upcast.pieces(9, row)) == [(0, 4), (4, 8), (8, 9)]
    assert covered(upcast.pieces(2, 9 * row)) == [(0, 1), (1, 2)]
    assert covered(upcast.pieces(3, 1)) == [(0, 3)]

"""The native rms_norm, rope and forms of rows, against numpy, MLX and expert_protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from expert_network import kernels
from expert_network.kernels import ops
from expert_protocol.dtypes import WireDType, finite

if not kernels.available():
    pytest.skip(kernels.reason(), allow_module_level=True)

pytestmark = pytest.mark.usefixtures("isa")

Array = NDArray[Any]
F = np.float32


def normal(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("shape", [(1, 2048), (5, 100), (2, 3, 4, 64), (3, 1), (700, 64)])
def test_rms_norm_is_mlx_s(shape: tuple[int, ...]) -> None:
    """With a weight, without one, of a transposed array, and in place."""
    rng = np.random.default_rng(1)
    x, weight = normal(rng, *shape) * 5, normal(rng, shape[-1])
    for given in (None, weight):
        out = np.empty_like(x)
        ops.rms_norm(x, given, 1e-5, out)
        factor = 1 / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5)
        np.testing.assert_allclose(out, x * factor * (1 if given is None else given), rtol=4e-7)
        want = mx.fast.rms_norm(mx.array(x), None if given is None else mx.array(given), 1e-5)
        np.testing.assert_allclose(out, np.array(want), rtol=1e-6, atol=1e-7)
    if len(shape) == 4:
        turned, straight = x.transpose(0, 2, 1, 3), np.empty((2, 4, 3, 64), F)
        ops.rms_norm(turned, weight, 1e-5, straight)
        np.testing.assert_array_equal(straight, out.transpose(0, 2, 1, 3))
    ops.rms_norm(x, weight, 1e-5, x)
    np.testing.assert_array_equal(x, out)


def angles_of(dims: int, base: float | None, freqs: Any, positions: Array) -> Array:
    """As MLX rounds them: everything but the sine and cosine in float32."""
    if base is None:
        inverse = np.float32(1) / freqs
    else:
        step = np.float32(np.log(np.float32(base)) / np.float32(dims // 2))
        inverse = np.exp((-np.arange(dims // 2, dtype=F) * step).astype(np.float64)).astype(F)
    angles: Array = positions.astype(F)[..., None] * inverse
    return angles.astype(np.float64)


@pytest.mark.parametrize("seed", range(16))
def test_rope_is_mlx_s(seed: int) -> None:
    """Both pairings, partial dims, bases and freqs, scales, one offset or many; 3 to 5 axes."""
    rng = np.random.default_rng(seed)
    batch, heads, length = (int(n) for n in rng.integers(1, 5, 3))
    size = int(rng.choice([8, 64, 80]))
    dims, traditional = int(rng.choice([size, size // 2, 6])), bool(seed % 2)
    shape = [(batch, length, size), (batch, length, heads, size), (batch, heads, 2, length, size)][
        seed % 3
    ]
    x = normal(rng, *shape)
    if x.ndim == 4:
        x = x.transpose(0, 2, 1, 3)
    freqs = None if seed % 4 else (np.abs(normal(rng, dims // 2)) * 50 + 1).astype(F)
    base, scale = (None if freqs is not None else 1e4), float(rng.choice([1.0, 0.25]))
    offset: Any = int(rng.integers(0, 5000))
    if seed % 5 == 0:
        offset = rng.integers(0, 5000, batch).astype(np.int32)
    out = np.full(x.shape, np.nan, F)
    ops.rope(x, out, dims, traditional, base, scale, offset, freqs)

    starts = np.broadcast_to(np.asarray(offset), (batch,))
    positions = (np.arange(length) + starts[:, None]).astype(F) * np.float32(scale)
    angles = angles_of(dims, base, freqs, positions)
    angles = angles.reshape(batch, *[1] * (x.ndim - 3), length, dims // 2)
    first: Any = np.s_[..., 0:dims:2] if traditional else np.s_[..., : dims // 2]
    second: Any = np.s_[..., 1:dims:2] if traditional else np.s_[..., dims // 2 : dims]
    want = x.astype(np.float64)
    want[first] = x[first] * np.cos(angles) - x[second] * np.sin(angles)
    want[second] = x[first] * np.sin(angles) + x[second] * np.cos(angles)
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-6)

    given = mx.array(offset) if isinstance(offset, np.ndarray) else offset
    theirs = mx.fast.rope(
        mx.array(x),
        dims,
        traditional=traditional,
        base=base,
        scale=scale,
        offset=given,
        freqs=None if freqs is None else mx.array(freqs),
    )
    # A last bit of 1 / base^i is 5000 radians times 6e-8.
    np.testing.assert_allclose(out, np.array(theirs), rtol=0, atol=2e-3)
    again = np.ascontiguousarray(x)
    ops.rope(again, again, dims, traditional, base, scale, offset, freqs)
    np.testing.assert_array_equal(again, out)


@pytest.mark.parametrize("size", [1, 7, 8, 64, 129])
def test_softmax_is_mlx_s(size: int) -> None:
    """It adds up to 1 and is MLX's, with numbers far apart and infinitely small ones too."""
    x = normal(np.random.default_rng(size), 6, size) * 20
    x[0, 1:] = -np.inf
    out = np.empty_like(x)
    ops.softmax(x, out)
    want = np.array(mx.softmax(mx.array(x), axis=-1))
    np.testing.assert_allclose(out, want, rtol=5e-6, atol=1e-12)
    np.testing.assert_allclose(out.sum(axis=-1), 1, rtol=1e-6)
    ops.softmax(x, x)
    np.testing.assert_array_equal(x, out)


def test_softmax_of_what_is_no_number() -> None:
    """One NaN makes all of its row NaN, and no other."""
    x = np.zeros((2, 20), F)
    x[0, 13] = np.nan
    ops.softmax(x, x)
    assert np.isnan(x[0]).all()
    np.testing.assert_allclose(x[1], 0.05)


X = np.zeros((2, 3, 8), F)
LONG = 1 << 40


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("x", lambda: ops.rms_norm(np.zeros((2, 16), F)[:, ::2], None, 1e-5, np.zeros((2, 8), F))),
        ("x", lambda: ops.rms_norm(np.zeros((), F), None, 1e-5, np.zeros((), F))),
        ("out", lambda: ops.rms_norm(X, None, 1e-5, np.zeros((3, 2, 8), F))),
        ("weight", lambda: ops.rms_norm(X, np.zeros(7, F), 1e-5, X.copy())),
        ("weight", lambda: ops.rms_norm(X, np.zeros(8), 1e-5, X.copy())),
        ("x", lambda: ops.softmax(X[..., ::2], np.zeros((2, 3, 4), F))),
        ("out", lambda: ops.softmax(X, X[0].copy())),
        ("x", lambda: ops.rope(X[0], X[0].copy(), 8, False, 1e4, 1.0, 0)),
        ("dims", lambda: ops.rope(X, X.copy(), 10, False, 1e4, 1.0, 0)),
        ("dims", lambda: ops.rope(X, X.copy(), 3, False, 1e4, 1.0, 0)),
        ("dims", lambda: ops.rope(X, X.copy(), 0, False, 1e4, 1.0, 0)),
        ("base, freqs", lambda: ops.rope(X, X.copy(), 8, False, None, 1.0, 0)),
        ("base, freqs", lambda: ops.rope(X, X.copy(), 8, False, 1e4, 1.0, 0, np.ones(4, F))),
        ("freqs", lambda: ops.rope(X, X.copy(), 8, False, None, 1.0, 0, np.ones(8, F))),
        ("offset", lambda: ops.rope(X, X.copy(), 8, False, 1e4, 1.0, LONG)),
        ("offset", lambda: ops.rope(X, X.copy(), 8, False, 1e4, 1.0, np.zeros(3, np.int32))),
        ("offset", lambda: ops.rope(X, X.copy(), 8, False, 1e4, 1.0, np.zeros(2, np.int64))),
        ("label", lambda: ops.encode(X, "f8", X.copy())),
        ("label", lambda: ops.encode(X, 3, X.copy())),  # type: ignore[arg-type]
        ("out", lambda: ops.encode(X, "f32", np.zeros((2, 3, 7), F))),
        ("raw", lambda: ops.decode(np.zeros(2 * 3 * 8, np.uint8), "int8", X.copy())),
        ("out", lambda: ops.decode(np.zeros(2 * 3 * 10, np.uint8), "int8", b"1234" * 48)),
        ("raw", lambda: ops.accumulate(X[0].copy(), None, np.zeros((2, 8), F), "f32")),
        ("rows", lambda: ops.accumulate(X[0].copy(), np.array([0.0, 1.0]), X[0, :2], "f32")),
        ("rows", lambda: ops.accumulate(X[0].copy(), np.array([0, 3]), X[0, :2], "f32")),
        ("rows", lambda: ops.accumulate(X[0].copy(), np.array([0, -1]), X[0, :2], "f32")),
        ("rows", lambda: ops.accumulate(X[0].copy(), np.array([-1], np.int16), X[0, :1], "f32")),
    ],
)
def test_rows_that_do_not_fit_are_refused(argument: str, call: Callable[[], object]) -> None:
    """Every wrong shape, dtype, label or number is a ValueError that names the argument."""
    with pytest.raises(ValueError, match=rf"^{argument}: "):
        call()


def rows_of(rng: np.random.Generator, count: int, size: int, kind: str) -> NDArray[np.float32]:
    rows = normal(rng, count, size) * np.float32(10.0 ** int(rng.integers(-6, 4)))
    if kind == "bits":
        return rng.integers(0, 2**32, (count, size), dtype=np.uint32).view(F)
    if kind == "ties":  # of bfloat16 and float16
        return rng.integers(-4095, 4096, (count, size)).astype(F)
    if kind == "halves":  # ties of int8, whose scale is then 1
        rows = rng.integers(-253, 254, (count, size)).astype(F) * F(0.5)
        rows[:, ::64] = 127
        return rows
    if kind == "tiny":
        rows *= F(1e-34)
    if kind == "huge":
        rows = np.clip(rows * F(1e38), np.finfo(F).min, np.finfo(F).max)
    if kind == "zero":
        rows[0] = 0
    if kind in ("inf", "nan"):
        rows[-1, size // 2] = F(kind)
    return rows


KINDS = ["plain", "bits", "ties", "halves", "tiny", "huge", "zero", "inf", "nan"]


@pytest.mark.parametrize("label", ["f32", "bf16", "f16", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_travel_as_the_protocol_defines(label: str, kind: str) -> None:
    """Encoding, decoding and adding match expert_protocol.dtypes bit for bit; so does `finite`."""
    rng = np.random.default_rng(7)
    dtype = WireDType.from_label(label)
    for count, size in ((1, 2048), (3, 100), (2, 64), (5, 33), (40, 1088)):
        rows = rows_of(rng, count, size, kind)
        raw = dtype.encode(rows)
        fine = finite(raw, dtype)
        out = np.empty_like(raw)
        assert ops.encode(rows, label, out) is fine
        if fine or label in ("bf16", "int8"):
            np.testing.assert_array_equal(out.view(np.uint8), raw.view(np.uint8))
        decoded = np.empty_like(rows)
        assert ops.decode(raw.tobytes(), label, decoded) is fine
        with np.errstate(all="ignore"):
            exact = dtype.decode(raw)
        np.testing.assert_array_equal(decoded, exact)
        total = normal(rng, count + 2, size)
        named, want = rng.permutation(count + 2)[:count], total.copy()
        if fine:
            want[named] += exact
        assert ops.accumulate(total, named.astype(np.uint16), raw, label) is fine
        np.testing.assert_array_equal(total, want)


def test_rows_are_added_one_after_the_other() -> None:
    """A row that is named twice is added twice, in order; None names all."""
    rng = np.random.default_rng(8)
    for size in (70, 20000):
        total, raw = np.zeros((2, size), F), normal(rng, 3, size)
        assert ops.accumulate(total, np.array([1, 0, 1], np.int64), raw, "f32")
        np.testing.assert_array_equal(total, [raw[1], raw[0] + raw[2]])
        assert ops.accumulate(total, None, raw[:2], "f32")
        np.testing.assert_array_equal(total, [raw[1] + raw[0], raw[0] + raw[2] + raw[1]])

"""The native attention, against numpy in float64, MLX, and mlx-lm over its caches."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import create_causal_mask, scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, RotatingKVCache
from numpy.typing import NDArray

from expert_network import kernels
from expert_network.kernels import ops
from expert_protocol.dtypes import WireDType

if not kernels.available():
    pytest.skip(kernels.reason(), allow_module_level=True)

pytestmark = pytest.mark.usefixtures("isa")

Array = NDArray[Any]
F = np.float32
LOWEST = np.finfo(F).min


def normal(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    return rng.standard_normal(shape).astype(np.float32)


def attend(q: Any, k: Any, v: Any, scale: float = 0.3, **options: Any) -> NDArray[np.float32]:
    out = np.full((*q.shape[:3], v.shape[3]), np.nan, np.float32)
    ops.attention(q, k, v, out, scale, **options)
    return out


def reference(
    q: Array,
    k: Array,
    v: Array,
    scale: float,
    causal: bool = False,
    mask: Array | None = None,
    sinks: Array | None = None,
) -> Array:
    repeats, length, keys = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    k, v = (np.repeat(a.astype(np.float64), repeats, axis=1) for a in (k, v))
    scores = q.astype(np.float64) * scale @ k.swapaxes(2, 3)
    if causal:
        mask = np.arange(keys) <= np.arange(length)[:, None] + keys - length
    if mask is not None:
        scores = np.where(mask, scores, LOWEST) if mask.dtype == bool else scores + mask
    if sinks is not None:
        column = np.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
        scores = np.concatenate([column, scores], axis=-1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    result: Array = weights[..., weights.shape[-1] - keys :] @ v
    return result


def as_bf16(values: NDArray[np.float32]) -> tuple[Array, NDArray[np.float32]]:
    raw = WireDType.BF16.encode(values)
    return raw, WireDType.BF16.decode(raw)


def stored(values: NDArray[np.float32], dtype: str) -> tuple[Array, NDArray[np.float32]]:
    """`values` as a cache of this dtype holds them, and what they are then in float32."""
    if dtype == "bfloat16":
        return as_bf16(values)
    held = values.astype(dtype)
    return held, held.astype(np.float32)


def random_mask(rng: np.random.Generator, heads: int, length: int, keys: int) -> Array | None:
    shapes = [(2, heads, length, keys), (length, keys), (2, 1, length, keys), (keys,), (1, 1, 1, 1)]
    shape = shapes[rng.integers(len(shapes))]
    return [None, rng.integers(0, 2, shape) > 0, normal(rng, *shape)][rng.integers(3)]


@pytest.mark.parametrize("seed", range(24))
def test_attention_of_any_shape_is_that_of_float64(seed: int) -> None:
    """Heads, lengths, dtypes, masks and sinks at random, on slices of a longer cache."""
    rng = np.random.default_rng(seed)
    key_heads, repeats = int(rng.integers(1, 3)), int(rng.choice([1, 2, 7]))
    length, keys = int(rng.choice([1, 1, 3, 16, 50])), int(rng.choice([1, 63, 128, 129, 600]))
    depth, width = int(rng.choice([4, 12, 64, 100, 128])), int(rng.choice([4, 36, 64, 128]))
    heads = key_heads * repeats
    q = normal(rng, 2, length, heads, depth).transpose(0, 2, 1, 3)
    dtype = str(rng.choice(["float32", "float16", "bfloat16"]))
    k, exact_k = stored(normal(rng, 2, key_heads, keys + 9, depth), dtype)
    v, exact_v = stored(normal(rng, 2, key_heads, keys + 9, width), dtype)
    causal = bool(rng.integers(2))
    mask = None if causal else random_mask(rng, heads, length, keys)
    sinks = normal(rng, heads) if rng.integers(2) else None
    part = np.s_[:, :, 5 : 5 + keys]
    got = attend(q, k[part], v[part], 0.2, causal=causal, mask=mask, sinks=sinks)
    want = reference(q, exact_k[part], exact_v[part], 0.2, causal, mask, sinks)
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-6 * max(1.0, np.abs(want).max()))


def mlx_attention(q: Array, k: Array, v: Array, mask: Any, sinks: Any = None) -> Array:
    given = None if sinks is None else mx.array(sinks)
    if isinstance(mask, np.ndarray):
        mask = mx.array(mask)
    arrays = (mx.array(a) for a in (q, k, v))
    return np.array(
        mx.fast.scaled_dot_product_attention(*arrays, scale=0.3, mask=mask, sinks=given)
    )


@pytest.mark.parametrize("length", [1, 5, 12])
@pytest.mark.parametrize("sinks", [False, True])
def test_masks_are_mlx_s(length: int, sinks: bool) -> None:
    """Rows that see nothing, more queries than keys and -inf give what MLX gives, NaN included."""
    rng = np.random.default_rng(length)
    q, k, v = normal(rng, 1, 6, length, 8), normal(rng, 1, 2, 7, 8), normal(rng, 1, 2, 7, 4)
    sink = normal(rng, 6) if sinks else None
    seen = rng.integers(0, 2, (length, 7)) > 0
    seen[0] = False
    added = np.where(seen, normal(rng, length, 7), -np.inf).astype(np.float32)
    for mask in (seen, added):
        want = mlx_attention(q, k, v, mask, sink)
        got = attend(q, k, v, mask=mask, sinks=sink)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    got = attend(q, k, v, causal=True, sinks=sink)
    np.testing.assert_allclose(got, mlx_attention(q, k, v, "causal", sink), rtol=1e-5, atol=1e-6)


KINDS: list[tuple[Any, dict[str, int]]] = [(KVCache, {}), (RotatingKVCache, {"max_size": 300})]


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_attention_reads_the_caches_of_mlx_lm_in_place(kind: Any, options: Any) -> None:
    """A prompt in two parts and three tokens, as mlx-lm's models attend over their caches."""
    cache = kind(**options)
    rng = np.random.default_rng(5)
    for length in (40, 230, 1, 1, 1):
        q, k, v = (mx.array(normal(rng, 1, n, length, 64)) for n in (8, 2, 2))
        before = cache.offset
        keys, values = cache.update_and_fetch(k, v)
        mask = create_causal_mask(length, before) if length > 1 else None
        want = scaled_dot_product_attention(q, keys, values, cache, scale=0.1, mask=mask)
        masks = [{"mask": mask}] if mask is None else [{"mask": mask}, {"causal": True}]
        for masked in masks:
            got = attend(q, keys, values, 0.1, **masked)
            np.testing.assert_allclose(got, np.array(want), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_half_precision_mlx_arrays_are_taken_as_they_are(dtype: Any) -> None:
    """k and v of an MLX model in half precision need no view and no copy."""
    rng = np.random.default_rng(2)
    q = mx.array(normal(rng, 1, 4, 1, 32))
    k, v = (mx.array(normal(rng, 1, 2, 300, 32)).astype(dtype) for _ in range(2))
    wide_k, wide_v = (np.array(a.astype(mx.float32)) for a in (k, v))
    want = reference(np.array(q), wide_k, wide_v, 0.3)
    np.testing.assert_allclose(attend(q, k, v), want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("form", [(1, 16, 4), (1, 600, 1), (70, 700, 2), (300, 300, 16)])
def test_no_bit_depends_on_the_number_of_threads(form: tuple[int, int, int]) -> None:
    """One, two and five threads give the same attention."""
    length, keys, key_heads = form
    rng = np.random.default_rng(3)
    q, k = normal(rng, 1, 16, length, 32), normal(rng, 1, key_heads, keys, 32)
    results = []
    for threads in (1, 2, 5):
        kernels.set_threads(threads)
        results.append(attend(q, k, k, causal=True).tobytes())
    assert results[0] == results[1] == results[2]


def test_weights_are_right_to_float32_s_rounding() -> None:
    """The exponential errs by less than 3e-7, relative, from 1 down to the smallest number."""
    below = np.linspace(0, 87, 4000, dtype=np.float32)
    k = np.stack([np.zeros_like(below), -below], axis=1)[:, None, :, None]
    v = np.broadcast_to(np.array([0, 1], np.float32)[:, None], k.shape)
    got = attend(np.ones((4000, 1, 1, 1), np.float32), k, v, 1.0).ravel()
    weights = np.exp(-below.astype(np.float64))
    assert np.abs(got / (weights / (1 + weights)) - 1).max() < 3e-7


def test_what_is_not_a_number_stays_so() -> None:
    """A NaN in q, k or v reaches the rows that it reaches in MLX, and no other."""
    rng = np.random.default_rng(0)
    for length in (1, 20):
        q, k = normal(rng, 1, 2, length, 8), normal(rng, 1, 2, 9, 8)
        q[0, 0, 0, 3] = np.nan
        assert np.isnan(attend(q, k, k)[0, 0, 0]).all()
        assert np.isfinite(attend(q, k, k)[0, 1]).all()
        k[0, 1, 8, 2] = np.inf
        np.testing.assert_array_equal(
            np.isnan(attend(q, k, k)), np.isnan(mlx_attention(q, k, k, None))
        )


GOOD: dict[str, Any] = {
    "scale": 1.0,
    "q": np.zeros((1, 4, 2, 8), F),
    "k": np.zeros((1, 2, 3, 8), F),
    "v": np.zeros((1, 2, 3, 8), F),
    "out": np.zeros((1, 4, 2, 8), F),
}
READ_ONLY = np.zeros((1, 4, 2, 8), F)
READ_ONLY.setflags(write=False)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("q", np.zeros((4, 2, 8), F)),
        ("q", np.zeros((1, 4, 2, 8))),
        ("q", np.zeros((1, 4, 2, 16), F)[..., ::2]),
        ("q", "no array"),
        ("k", np.zeros((1, 3, 3, 8), F)),
        ("k", np.zeros((2, 2, 3, 8), F)),
        ("k", np.zeros((1, 2, 3, 7), F)),
        ("k", np.zeros((1, 0, 3, 8), F)),
        ("k", np.zeros((1, 2, 3, 8), np.int32)),
        ("v", np.zeros((1, 2, 4, 8), F)),
        ("v", np.zeros((1, 1, 3, 8), F)),
        ("out", np.zeros((1, 4, 2, 7), F)),
        ("out", np.zeros((1, 4, 2, 16), F)[..., :8]),
        ("out", READ_ONLY),
        ("mask", np.zeros((2, 4), bool)),
        ("mask", np.zeros((1, 1, 1, 2, 3), bool)),
        ("mask", np.zeros((2, 3), np.uint8)),
        ("sinks", np.zeros(3, F)),
        ("sinks", np.zeros((4, 1), F)),
    ],
)
def test_attention_refuses_what_does_not_fit(name: str, bad: Any) -> None:
    """Every wrong shape, dtype or layout is a ValueError that names the argument."""
    with pytest.raises(ValueError, match=rf"^{name}: "):
        ops.attention(**{**GOOD, name: bad})


def test_attention_over_no_keys_is_refused_and_of_no_queries_is_nothing() -> None:
    """There is no softmax of nothing; an empty batch or length is no mistake."""
    empty = np.zeros((1, 2, 0, 8), F)
    with pytest.raises(ValueError, match="k: 0 keys"):
        ops.attention(**{**GOOD, "k": empty, "v": empty})
    none = np.zeros((1, 4, 0, 8), F)
    ops.attention(**{**GOOD, "q": none, "out": none})

"""expert_network.model.native and expert_network.model.fast"""

from __future__ import annotations

import gc
import io
import os
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import quantize
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, make_prompt_cache

from expert_network import kernels
from expert_network.backend import detect
from expert_network.experts.partition import load_partition
from expert_network.model import fast, native, upcast
from expert_network.model.host import HostArray
from expert_network.model.seam import Mode, find_switches, install
from expert_network.model.trunk import arrays, load_trunk
from expert_network.store.convert import preprocess
from expert_network.store.reader import Store
from tests.network import families
from tests.network.family_runs import OneNode, error, logits
from tests.support.synthetic import Shape, make_checkpoint

BACKEND = detect()
pytestmark = pytest.mark.skipif(not BACKEND.native, reason="about native kernels")

FULL = bool(os.environ.get("EXPERT_TESTS_FULL"))

# One of each way to attend: grouped heads, latent ones, sinks and windows, hybrids.
SOME = ["olmoe", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next", "jamba", "gemma4"]
FAMILIES = sorted({*families.families()} - {"muse_spark"}) if FULL else SOME

ROWS, COLUMNS = 200, 128


class Holder(Module):
    """A layer in a model."""

    def __init__(self, layer: Any) -> None:
        cast(Any, super()).__init__()
        self.layer = layer

    def __call__(self, x: mx.array) -> Any:
        return self.layer(x)


def held(layer: Any, dtype: mx.Dtype = mx.bfloat16, *, bits: int = 0) -> Holder:
    layer.set_dtype(dtype)
    holder = Holder(layer)
    if bits:
        quantize(holder, 64, bits)
    upcast.to_float32(holder)
    mx.eval(cast(Any, holder).parameters())
    return holder


def x(*shape: int) -> mx.array:
    return mx.array(np.random.default_rng(2).standard_normal(shape, dtype=np.float32))


def near(found: Any, expected: Any, tolerance: float) -> bool:
    difference = np.linalg.norm(np.array(found) - np.array(expected))
    return bool(difference < tolerance * np.linalg.norm(np.array(expected)))


# --- families


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_computes_the_same(family: str) -> None:
    """Prefill, steps and a long prefill give MLX's logits within 1e-5, through every cache."""
    reference = logits(families.build(family))
    model: Any = families.build(family)
    install(model, OneNode(find_switches(model)), "sum")
    mx.eval(list(arrays(model)))
    native.install(model, precise=True, routers=())
    assert error(logits(model), reference) < 1e-5


# --- a store's trunk


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("store")
    shape = Shape(layers=2, experts=8, hidden=256, intermediate=128, vocab=1024)
    return preprocess(make_checkpoint(folder / "checkpoint", shape), folder / "store", bits=4)


def loaded(store: Store, backend: Any = BACKEND, precise: bool = True, mode: Mode = "sum") -> Any:
    everything = {layer: np.arange(experts) for layer, experts in store.manifest.shape}
    part = load_partition(store, everything, backend, precise=precise)
    return load_trunk(store, backend, part, mode, precise)


def test_precisions(store: Store) -> None:
    """Precise, a quantized model computes what MLX does; else it rounds, a little and all over."""
    ids = [[3, 7, 200, 5, 9, 11, 400, 2]]
    reference = loaded(store, detect("mlx"))(mx.array(ids))
    precise, rounded = (loaded(store, precise=p)(mx.array(ids)) for p in (True, False))
    assert near(precise, reference, 1e-5)
    assert near(rounded, reference, 0.1) and not near(rounded, reference, 1e-3)


def test_modes(store: Store) -> None:
    """A precise sum in one process is the exact run, but for the order in which it is added."""
    ids = mx.array([[3, 7, 200, 5]])
    assert near(loaded(store)(ids), loaded(store, mode="exact")(ids), 1e-5)


def test_waits(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token waits for MLX once, for its embedding, and in no layer."""
    model = loaded(store, precise=False)
    cache = make_prompt_cache(model)
    model(mx.array([[3, 7, 200, 5]]), cache=cache)
    waits = 0
    real = cast(Any, mx.eval)

    def counted(arrays: Any) -> None:
        nonlocal waits
        waits += any(_is_lazy(array) for array in arrays)
        real(arrays)

    monkeypatch.setattr(mx, "eval", counted)
    mx.array(model(mx.array([[9]]), cache=cache))
    assert waits == 1


def _is_lazy(array: mx.array) -> bool:
    """Whether there is an operation left to compute."""
    graph = io.StringIO()
    mx.export_to_dot(graph, array)
    return "rectangle" in graph.getvalue()


def test_routers_stay_precise(store: Store) -> None:
    """What chooses experts is never rounded, whatever else is."""
    model = loaded(store, precise=False)
    layer = model.model.layers[0]
    assert layer.mlp.gate.precision == kernels.F32
    assert layer.self_attn.q_proj.precision == kernels.INT8
    assert loaded(store).model.layers[0].self_attn.q_proj.precision == kernels.F32


def test_other_models_are_left_alone(store: Store) -> None:
    """With a native model in the process, MLX's own functions give others the bits they gave."""
    q, weight = x(1, 2, 3, 8), mx.ones((8,))

    def all_three() -> list[mx.array]:
        angle: dict[str, Any] = {"traditional": False, "base": 1e4, "scale": 1.0, "offset": 3}
        return [
            mx.fast.scaled_dot_product_attention(q, q, q, scale=0.3, mask="causal"),
            mx.fast.rms_norm(q, weight, 1e-5),
            mx.fast.rope(q, 8, **angle),
        ]

    loaded(store)
    assert not any(isinstance(found, HostArray) for found in all_three())
    with fast.running(precise=True):
        assert all(isinstance(found, HostArray) for found in all_three())


# --- layers


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("bits", [0, 4, 8])
def test_linear(bits: int, bias: bool) -> None:
    """A linear layer gives what it gave, for rows of any shape, evaluated or not."""
    holder = held(Linear(COLUMNS, ROWS, bias), bits=bits)
    expected = [holder(x(*shape, COLUMNS)) for shape in ((2, 3), (1,), ())]
    native.install(holder, precise=True, routers=())
    for shape, array in zip(((2, 3), (1,), ()), expected, strict=True):
        found = holder(x(*shape, COLUMNS) * 1.0)
        assert isinstance(found, HostArray) and found.dtype == mx.float32
        assert found.shape == array.shape and near(found, array, 1e-6)
        assert near(holder(HostArray.of(np.array(x(*shape, COLUMNS)))), array, 1e-6)


@pytest.mark.parametrize("bits", [0, 4])
def test_embedding(bits: int) -> None:
    """An embedding gives the same rows, and as a head the same products."""
    holder = held(Embedding(ROWS, COLUMNS), bits=bits)
    ids = mx.array([[3, 199, 0]])
    rows, products = holder(ids), holder.layer.as_linear(x(1, 2, COLUMNS))
    native.install(holder, precise=True, routers=())
    assert mx.array_equal(holder(ids), rows) and isinstance(holder(ids), HostArray)
    assert near(holder.layer.as_linear(x(1, 2, COLUMNS)), products, 1e-6)


def test_what_kernels_do_not_know() -> None:
    """A layer that computes in a way of its own, or is stored in another, stays MLX's."""

    class Doubling(Linear):
        def __call__(self, x: mx.array) -> mx.array:
            result: mx.array = super().__call__(x)
            return result * 2

    own, strange = held(Doubling(COLUMNS, ROWS)), Holder(Linear(COLUMNS, ROWS, False))
    quantize(strange, mode="mxfp8")
    for holder in (own, strange):
        expected = holder(x(1, COLUMNS))
        native.install(holder, precise=True, routers=())
        assert mx.array_equal(holder(x(1, COLUMNS)), expected)
        assert "matrix" not in vars(holder.layer)


# --- the cache


def new_cache() -> Any:
    made: Any = KVCache
    return made()


def step(cache: Any, length: int, seed: int, heads: int = 2) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    keys, values = rng.standard_normal((2, 1, heads, length, 8), dtype=np.float32)
    found = cache.update_and_fetch(mx.array(keys), mx.array(values))
    return tuple(np.array(array.astype(mx.float32)) for array in found)  # type: ignore[return-value]


@pytest.mark.parametrize("precise", [True, False])
def test_cache(precise: bool) -> None:
    """Keys and values come back as they were put in, over growth and going back; float16 if
    not precise."""
    fast.install()
    plain, ours = new_cache(), new_cache()
    tolerance = 0.0 if precise else 1e-3
    for seed, length in enumerate((5, 1, 300, 1, 700)):
        expected = step(plain, length, seed)
        with fast.running(precise):
            found = step(ours, length, seed)
        assert ours.offset == plain.offset
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
        plain.trim(2)
        ours.trim(2)
    assert ours.keys.dtype == (mx.float32 if precise else mx.float16)
    # What mlx-lm itself makes of the cache is the same, too.
    assert np.allclose(np.array(ours.state[0][..., :50, :]), plain.state[0][..., :50, :], atol=1e-3)


def test_cache_in_place() -> None:
    """A token is written into the memory that is there: nothing of the cache is copied."""
    fast.install()
    cache = new_cache()
    with fast.running(precise=False):
        step(cache, 10, 1)
        memory = cache.keys.host.ctypes.data
        for seed in range(100):
            step(cache, 1, seed)
            assert cache.keys.host.ctypes.data == memory


def test_cache_is_freed() -> None:
    """A cache's memory is given back when nobody holds the cache, without Python's collector."""
    fast.install()
    gc.disable()
    try:
        before = mx.get_active_memory()
        cache = new_cache()
        with fast.running(precise=True):
            step(cache, 20_000, 1)
            assert mx.get_active_memory() - before > 2e6
        del cache
        assert mx.get_active_memory() - before < 1e5
    finally:
        gc.enable()


def test_cache_of_large_values() -> None:
    """What float16 cannot hold is kept as float32, and so is what the cache held before."""
    fast.install()
    cache = new_cache()
    with fast.running(precise=False):
        before = step(cache, 3, 1)
        large = mx.full((1, 2, 1, 8), 1e5)
        keys, values = cache.update_and_fetch(large, large)
    assert (keys.dtype, values.dtype) == (mx.float32, mx.float32)
    assert np.array_equal(np.array(keys)[:, :, :3], before[0])
    assert float(keys.max()) == 1e5


def test_attention_over_the_cache() -> None:
    """mlx-lm's attention over a float16 cache is within 1e-3 of that over a float32 one."""
    fast.install()
    q = x(1, 4, 1, 8)
    found = []
    for precise in (True, False):
        cache = new_cache()
        with fast.running(precise):
            step(cache, 20, 3)
            keys, values = cache.update_and_fetch(q[:, :2], q[:, 2:])
            found.append(scaled_dot_product_attention(q, keys, values, cache, scale=0.3, mask=None))
    assert near(found[1], found[0], 1e-3)
    assert not mx.array_equal(found[0], found[1])

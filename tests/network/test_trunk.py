from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache

from expert_network.backend import detect
from expert_network.errors import StoreCorrupt
from expert_network.experts.partition import Partition, load_partition
from expert_network.model import upcast
from expert_network.model.seam import Mode, Seam, SwitchSite, find_switches, install
from expert_network.model.trunk import arrays, load_trunk
from expert_network.store.convert import preprocess
from expert_network.store.reader import Store
from tests.network import families
from tests.network.family_runs import OneNode, error, logits
from tests.support.synthetic import Shape, make_checkpoint
from tests.support.threads import on_a_thread

GOLDEN = Path(__file__).parent.parent / "golden"
SHAPE = Shape(layers=2, experts=8, hidden=256, intermediate=128, vocab=4096)
IDS = mx.array([[3, 7, 200, 5]])


@pytest.fixture(scope="module", params=[None, 4], ids=["bfloat16", "affine 4"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("store")
    source = make_checkpoint(folder / "checkpoint", SHAPE)
    return preprocess(source, folder / "store", bits=request.param)


def everything(store: Store) -> Partition:
    return load_partition(store, {n: np.arange(e) for n, e in store.manifest.shape}, detect())


def loaded(store: Store, mode: Mode = "sum") -> Any:
    return load_trunk(store, detect(), everything(store), mode)


def test_float32_on_a_cpu(store: Store) -> None:
    """On CPU logits and caches are float32, and the large matrices keep the dtype they had."""
    model = loaded(store)
    cache = make_prompt_cache(model)
    assert model(IDS, cache=cache).dtype == mx.float32
    assert {layer.keys.dtype for layer in cache} == {mx.float32}
    dtypes = {array.dtype for array in (model.lm_head.weight, model.model.embed_tokens.weight)}
    assert dtypes == {mx.uint32 if "scales" in model.lm_head else mx.bfloat16}


def test_a_gpu_keeps_its_dtype(store: Store) -> None:
    """On another backend nothing is cast."""
    other = type(detect())("mlx-metal", "0", "gpu")
    model = load_trunk(store, other, everything(store), "exact")
    half = [array for array in arrays(model) if array.dtype == mx.bfloat16]
    assert len(half) > 10


def test_memory_is_the_file(store: Store) -> None:
    """A trunk takes about what its file takes: no expert, and no second copy of a matrix."""
    part = everything(store)
    before = mx.get_active_memory()
    model: Any = load_trunk(store, detect(), part, "sum")
    assert mx.get_active_memory() - before < store.trunk_path.stat().st_size * 1.25
    assert sum(isinstance(module, Seam) for module in model.modules()) == SHAPE.layers


def test_flipped_byte(store: Store, tmp_path: Path) -> None:
    """A byte of the trunk that changed on the disk is found before the model is built."""
    (tmp_path / "bin").mkdir()
    for file in store.path.rglob("*.*"):
        (tmp_path / file.relative_to(store.path)).write_bytes(file.read_bytes())
    trunk = bytearray((tmp_path / "trunk.safetensors").read_bytes())
    trunk[-5] ^= 1
    (tmp_path / "trunk.safetensors").write_bytes(trunk)
    with pytest.raises(StoreCorrupt, match=r"trunk\.safetensors: the file does not match"):
        loaded(Store.open(tmp_path))


@pytest.mark.parametrize("mode", ["sum", "exact"])
def test_modes_agree(store: Store, mode: Mode) -> None:
    """Both modes give the same logits but for the last bits, and the same each time."""
    first = np.array(loaded(store, mode)(IDS))
    assert np.array_equal(first, np.array(loaded(store, mode)(IDS)))
    assert np.allclose(first, np.array(loaded(store, "exact")(IDS)), atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "qwen3_next"])
def test_threads(family: str, tmp_path: Path) -> None:
    """A model loaded on one thread gives another the logits that it gives its own."""
    store = preprocess(GOLDEN / family, tmp_path / "store")

    def load() -> Any:
        return load_trunk(store, detect(), everything(store), "sum")

    model = on_a_thread(load)
    first = on_a_thread(lambda: np.array(model(IDS)))
    assert np.array_equal(first, np.array(load()(IDS)))


def test_hidden_arrays_are_found() -> None:
    """Arrays that are no parameters are found too, in modules, lists and plain helpers."""
    model = families.build("deepseek_v2")
    hidden = [m._freqs for m in cast(Any, model).modules() if hasattr(m, "_freqs")]
    found = {id(array) for array in arrays(model)}
    assert hidden
    assert {id(array) for array in hidden} <= found


class _Float32Node(OneNode):
    """The family's switch modules, whose weights are float32."""

    def __init__(self, sites: list[SwitchSite]) -> None:
        super().__init__(sites)
        self.seen: set[mx.Dtype] = set()

    def outputs(self, layer: int, x: mx.array, ids: mx.array) -> mx.array:
        self.seen.add(x.dtype)
        return super().outputs(layer, x, ids)


def _rounded(family: str) -> Any:
    """A tiny family whose weights are float32 and fit bfloat16."""
    model: Any = families.build(family)
    fitting = tree_map(lambda p: p.astype(mx.bfloat16).astype(p.dtype), model.parameters())
    model.update(fitting)
    mx.eval(model.parameters())
    return model


# muse_spark runs on Metal only.
@pytest.mark.parametrize("family", sorted({*families.families()} - {"muse_spark"}))
def test_every_family(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family stored in bfloat16 computes in float32 throughout, on a thread not its loader's."""
    monkeypatch.setattr(upcast, "SMALL_BYTES", 0)  # else nothing of so small a model is cast late
    reference = logits(_rounded(family))
    model = _rounded(family)
    experts = _Float32Node(find_switches(model))
    install(model, experts, "sum")
    model.set_dtype(mx.bfloat16)
    upcast.to_float32(model)
    mx.eval(list(arrays(model)))
    experts.seen.clear()
    found = on_a_thread(lambda: logits(model))
    assert experts.seen == {mx.float32}
    assert error(found, reference) < 1e-5

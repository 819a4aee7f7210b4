from __future__ import annotations

import gc
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

from expert_network import kernels
from expert_network.backend import Kernels, detect
from expert_network.errors import NotOwned, StoreCorrupt
from expert_network.experts.partition import (
    EXACT,
    SUM,
    Partition,
    load_partition,
    partition_bytes,
)
from expert_network.store.convert import preprocess
from expert_network.store.reader import Store
from tests.support.synthetic import Shape, make_checkpoint, of_size
from tests.support.threads import on_a_thread

SHAPE = Shape(family="qwen3_moe", layers=2, experts=8, hidden=64, intermediate=96)
BLOCKS = {0: np.array([0, 2, 3, 7]), 1: np.array([4])}


@pytest.fixture(scope="module", params=[None, 4], ids=["bfloat16", "affine 4"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("store")
    source = make_checkpoint(folder / "checkpoint", SHAPE)
    return preprocess(source, folder / "store", bits=request.param, group_size=32)


@pytest.fixture(scope="module")
def part(store: Store) -> Partition:
    return load_partition(store, BLOCKS, detect())


def dispatch(counts: list[int], held: Any = BLOCKS[0]) -> dict[str, Any]:
    """A dispatch whose rows have these numbers of pairs."""
    rng = np.random.default_rng(5)
    pairs = sum(counts)
    return {
        "rows": rng.standard_normal((len(counts), SHAPE.hidden), dtype=np.float32),
        "offsets": np.cumsum([0, *counts]).astype(np.uint32),
        "ids": rng.choice(held, pairs).astype(np.uint16),
        "weights": rng.random(pairs, dtype=np.float32),
    }


def test_what_is_held(store: Store, part: Partition) -> None:
    """A partition holds the blocks that it was asked for, knows their size, and no others."""
    assert part.blocks == 5
    assert part.nbytes == partition_bytes(store.manifest, BLOCKS)
    assert part.nbytes == 5 * store.manifest.layer(0).block_bytes
    assert part.owned(0).tolist() == [0, 2, 3, 7]
    assert part.owned(1).tolist() == [4]
    assert part.owned(9).tolist() == []
    assert part.holds(0, 7) and not part.holds(0, 1) and not part.holds(9, 0)
    assert part.compute_dtype == detect().compute_dtype("bfloat16")
    assert part.numerics == detect().numerics(part.compute_dtype)


def test_blocks_come_back(store: Store, part: Partition) -> None:
    """Every block is given back from memory as it lies in the store, with the manifest's sha256."""
    part.compute(0, SUM, **dispatch([2, 1]))
    for layer, ids in BLOCKS.items():
        for expert in ids.tolist():
            block = on_a_thread(partial(part.block_bytes, layer, expert))
            assert block == bytes(store.read_block(layer, expert))
            digest = hashlib.sha256(block).hexdigest()
            assert digest == store.manifest.layer(layer).sha256[expert]


def test_progress(store: Store) -> None:
    """Loading tells the bytes that it has read, up to all of them."""
    told: list[tuple[int, int]] = []
    load_partition(store, BLOCKS, detect(), lambda done, total, _: told.append((done, total)))
    size = store.manifest.layer(0).block_bytes
    assert told == [(n * size, 5 * size) for n in range(1, 6)]


def test_nothing_owned(store: Store) -> None:
    """A partition without blocks loads, and says whatever it is asked for that it has none."""
    part = load_partition(store, {0: np.array([], np.intp), 1: np.array([], np.intp)}, detect())
    assert (part.blocks, part.nbytes) == (0, 0)
    with pytest.raises(NotOwned):
        part.compute(0, SUM, **dispatch([1]))


def test_flipped_byte(store: Store, tmp_path: Path) -> None:
    """A byte that changed on the disk is found while loading, and its block named."""
    (tmp_path / "bin").mkdir()
    for file in store.path.rglob("*.*"):
        (tmp_path / file.relative_to(store.path)).write_bytes(file.read_bytes())
    spec = store.manifest.layer(0)
    with (tmp_path / spec.file).open("r+b") as layer:
        layer.seek(spec.offset(3) + 100)
        byte = layer.read(1)
        layer.seek(-1, 1)
        layer.write(bytes([byte[0] ^ 1]))
    broken = Store.open(tmp_path)
    with pytest.raises(StoreCorrupt, match=r"layer_00\.bin: block \(0, 3\) at offset"):
        load_partition(broken, BLOCKS, detect())
    assert load_partition(broken, {0: np.array([2])}, detect()).blocks == 1


@pytest.mark.parametrize("counts", [[1], [4], [2, 2, 2], [1, 3, 2, 1, 4], [3] * 40])
def test_exact(part: Partition, counts: list[int]) -> None:
    """An exact answer has each pair's own output, in the order of the pairs."""
    asked = dispatch(counts)
    answer = part.compute(0, EXACT, **asked)
    assert answer.shape == (sum(counts), SHAPE.hidden) and answer.dtype == np.float32
    row_of = np.repeat(np.arange(len(counts)), counts)
    one = [
        np.array(part.outputs(0, mx.array(asked["rows"][[row]]), mx.array([[int(expert)]])))[0, 0]
        for row, expert in zip(row_of, asked["ids"], strict=True)
    ]
    assert np.array_equal(answer, np.stack(one))


@pytest.mark.parametrize("counts", [[1], [4], [2, 2, 2], [1, 3, 2, 1, 4], [3] * 40])
def test_sum(part: Partition, counts: list[int]) -> None:
    """A sum is added in float32, in the order of the pairs, whatever other rows there are."""
    asked = dispatch(counts)
    outputs = part.compute(0, EXACT, **asked) * asked["weights"][:, None]
    expected = np.zeros((len(counts), SHAPE.hidden), np.float32)
    for row, (start, end) in enumerate(zip(asked["offsets"], asked["offsets"][1:], strict=False)):
        for pair in range(start, end):
            expected[row] += outputs[pair]
    answer = part.compute(0, SUM, **asked)
    assert answer.dtype == np.float32
    assert np.array_equal(answer, expected)


@pytest.mark.parametrize("mode", [SUM, EXACT])
def test_parts(store: Store, mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dispatch too long for one call of MLX is answered in parts, with the same bits."""
    part = load_partition(store, BLOCKS, detect("mlx"))
    asked = dispatch([3, 1, 2, 2, 5, 1, 1])
    whole = part.compute(0, mode, **asked)
    monkeypatch.setattr(cast(Any, part._parts[0][0])._resident, "most_pairs", 4)
    assert np.array_equal(part.compute(0, mode, **asked), whole)


def test_in_process(part: Partition) -> None:
    """What a model in this process is given is what a node answers, in the rows' own dtype."""
    asked = dispatch([3, 3])
    x, ids = mx.array(asked["rows"]), mx.array(asked["ids"].reshape(2, 3))
    outputs = part.outputs(0, x, ids)
    exact = part.compute(0, EXACT, **asked).reshape(2, 3, -1)
    assert np.array_equal(np.array(outputs), exact)
    assert part.outputs(0, x.astype(mx.bfloat16), ids).dtype == mx.bfloat16
    total = part.weighted_sum(0, x, ids, mx.array(asked["weights"].reshape(2, 3)))
    assert total.dtype == mx.float32
    assert np.allclose(np.array(total), part.compute(0, SUM, **asked), atol=1e-6)


def test_rows_that_are_mlx_arrays(part: Partition) -> None:
    """Rows may come as an MLX array, or read-only as they do from the wire."""
    asked = dispatch([2, 1])
    answer = part.compute(0, SUM, **asked)
    asked["rows"].flags.writeable = False
    assert np.array_equal(part.compute(0, SUM, **asked), answer)
    asked["rows"] = mx.array(asked["rows"])
    assert np.array_equal(part.compute(0, SUM, **asked), answer)


@pytest.mark.parametrize("layer, expert", [(0, 1), (0, 8), (1, 0), (7, 0)])
def test_not_owned(part: Partition, layer: int, expert: int) -> None:
    """A block that is not held is refused by its own name, by every way in."""
    asked = dispatch([2], [expert])
    x, ids = mx.array(asked["rows"]), mx.array(asked["ids"].reshape(1, 2))
    ways: list[Callable[[], Any]] = [
        lambda: part.compute(layer, SUM, **asked),
        lambda: part.outputs(layer, x, ids),
        lambda: part.weighted_sum(layer, x, ids, mx.ones((1, 2))),
        lambda: part.block_bytes(layer, expert),
    ]
    for way in ways:
        with pytest.raises(NotOwned) as caught:
            way()
        assert (caught.value.layer, caught.value.expert) == (layer, expert)


def test_threads(store: Store) -> None:
    """Loaded on one thread, asked on two others that have ended since: the same bits."""
    part = on_a_thread(lambda: load_partition(store, BLOCKS, detect()))
    ask = partial(part.compute, 0, EXACT, **dispatch([3] * 30))
    first, second, third = on_a_thread(ask), on_a_thread(ask), ask()
    assert np.array_equal(first, second)
    assert np.array_equal(first, third)


_MEASURE = """
import json, sys
import numpy as np
from expert_network import kernels
from expert_network.backend import Kernels, detect
backend = detect()
from expert_network.memory import peak_rss
from expert_network.experts.partition import load_partition
from expert_network.store.reader import Store
store = Store.open(sys.argv[1])
blocks = {layer: np.arange(0, experts, 2) for layer, experts in store.manifest.shape}
part = load_partition(store, blocks, backend)
loaded = peak_rss()
rows = np.ones((128, store.manifest.layers[0].hidden), np.float32)
ids = np.arange(0, 1024, 2).astype(np.uint16) % 64
part.compute(0, 0, rows, np.arange(0, 513, 4, dtype=np.uint32), ids, np.ones(512, np.float32))
print(json.dumps([part.nbytes, loaded, peak_rss()]))
"""


def test_memory(tmp_path: Path) -> None:
    """Loading peaks below the partition and 200 MB, a long dispatch below it and 300 MB."""
    source = make_checkpoint(tmp_path / "checkpoint", of_size(400_000_000))
    preprocess(source, tmp_path / "store")
    command = [sys.executable, "-c", _MEASURE, str(tmp_path / "store")]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    size, loaded, served = json.loads(run.stdout)
    assert size > 190e6
    assert loaded < size + 200e6
    assert served < size + 300e6


def together(store: Store, layer: int, experts: list[int]) -> Partition:
    return load_partition(store, {layer: np.array(experts)}, detect())


def taken(store: Store, layer: int, experts: list[int]) -> dict[int, bytes]:
    return {expert: bytes(store.read_block(layer, expert)) for expert in experts}


def fit(part: Partition, store: Store, layer: int, experts: list[int]) -> None:
    """Hold these experts of a layer alone; the store gives what is not held."""
    missing = [expert for expert in experts if not part.holds(layer, expert)]
    spec = store.manifest.layer(layer)
    part.put(
        spec,
        part.fitted(spec, np.array(experts, np.intp), taken(store, layer, missing).__getitem__),
    )


KERNELS: tuple[Kernels, ...] = ("native", "mlx") if kernels.available() else ("mlx",)


@pytest.mark.parametrize("chosen", KERNELS)
def test_what_is_held_changes(store: Store, chosen: Kernels) -> None:
    """A layer gains blocks and gives others up, and computes the bits of one loaded so at once."""
    part, spec = load_partition(store, BLOCKS, detect(chosen)), store.manifest.layer(0)
    made = part.fitted(spec, np.array([7, 5, 2]), taken(store, 0, [5]).__getitem__)
    assert part.owned(0).tolist() == [0, 2, 3, 7]  # until it is put
    part.put(spec, made)
    assert (part.owned(0).tolist(), part.blocks) == ([2, 5, 7], 4)
    alike = load_partition(store, {0: np.array([2, 5, 7])}, detect(chosen))
    for mode in (SUM, EXACT):
        asked = dispatch([1, 3, 2], [2, 5, 7])
        made_now, expected = (p.compute(0, mode, **asked) for p in (part, alike))
        assert made_now.tobytes() == expected.tobytes()
    assert part.block_bytes(0, 5) == bytes(store.read_block(0, 5))
    with pytest.raises(NotOwned):
        part.compute(0, SUM, **dispatch([1], [3]))


@pytest.mark.parametrize("chosen", KERNELS)
def test_a_layer_comes_and_goes(store: Store, chosen: Kernels) -> None:
    """The last block of a layer can be given up, and the first one gained."""
    part = load_partition(store, {0: np.array([1])}, detect(chosen))
    fit(part, store, 0, [])
    fit(part, store, 1, [6])
    assert (part.owned(0).tolist(), part.owned(1).tolist(), part.blocks) == ([], [6], 1)
    fit(part, store, 0, [4])
    asked = dispatch([2], [4])
    alike = load_partition(store, {0: np.array([4])}, detect(chosen))
    assert part.compute(0, SUM, **asked).tobytes() == alike.compute(0, SUM, **asked).tobytes()


@pytest.mark.skipif(not kernels.available(), reason="there are no native kernels here")
def test_native_code_goes_on_with_new_experts(store: Store) -> None:
    """What native code was given for a layer stays the same object, whatever the layer holds."""
    part = load_partition(store, BLOCKS, detect("native"))
    given = part.native(0)
    assert given is not None
    fit(part, store, 0, [1])
    assert part.native(0) is given
    fit(part, store, 0, [])
    fit(part, store, 0, [1, 3])
    assert part.native(0) is given
    part.hold(store.manifest.layer(0), taken(store, 0, [5]))
    assert part.native(0) is None  # in two parts: one call is not enough
    fit(part, store, 0, [3, 5])
    assert part.native(0) is given


@pytest.mark.parametrize("precise", [True, False], ids=["precise", "fast"])
@pytest.mark.parametrize("counts", [[3], [2, 1, 4], [8] * 40], ids=["one", "few", "many"])
def test_blocks_taken_later_compute_as_if_loaded(
    store: Store, counts: list[int], precise: bool
) -> None:
    """Outputs of blocks that were taken one by one have the bits of blocks loaded together."""
    part = load_partition(store, {0: np.array([0, 2])}, detect())
    for group in ([7], [3, 5], [1]):
        part.hold(store.manifest.layer(0), taken(store, 0, group))
    held = [0, 1, 2, 3, 5, 7]
    assert part.owned(0).tolist() == held and part.blocks == 6
    asked = dispatch(counts, held)
    whole = together(store, 0, held)
    made, expected = (each.compute(0, EXACT, **asked, precise=precise) for each in (part, whole))
    assert np.array_equal(made, expected)
    made, expected = (each.compute(0, SUM, **asked, precise=precise) for each in (part, whole))
    assert np.allclose(made, expected, rtol=1e-5, atol=1e-5)
    for expert in held:
        assert part.block_bytes(0, expert) == bytes(store.read_block(0, expert))


def test_a_layer_that_was_not_there_is_taken(store: Store) -> None:
    """A layer of which nothing was loaded can be taken too."""
    part = load_partition(store, {0: np.array([0])}, detect())
    part.hold(store.manifest.layer(1), taken(store, 1, [4, 6]))
    asked = dispatch([2, 2], [4, 6])
    expected = together(store, 1, [4, 6]).compute(1, EXACT, **asked)
    assert np.array_equal(part.compute(1, EXACT, **asked), expected)


def test_what_is_not_held_is_never_computed(store: Store) -> None:
    """With blocks taken later too a missing one raises NotOwned, and so does one given back."""
    part = load_partition(store, {0: np.array([0, 2])}, detect())
    part.hold(store.manifest.layer(0), taken(store, 0, [3]))
    with pytest.raises(NotOwned):
        part.compute(0, EXACT, **dispatch([3, 3], [0, 3, 5]))
    fit(part, store, 0, [2, 3])
    assert part.owned(0).tolist() == [2, 3]
    with pytest.raises(NotOwned):
        part.compute(0, EXACT, **dispatch([3], [0]))
    fit(part, store, 0, [])
    assert part.blocks == part.nbytes == 0


def test_blocks_that_come_one_by_one_are_put_together(store: Store) -> None:
    """However many come, a dispatch is at most MOST_PARTS calls, and the bits stay the same."""
    part = load_partition(store, {}, detect())
    spec = store.manifest.layer(0)
    for _ in range(2):
        for expert in range(spec.experts):
            part.hold(spec, taken(store, 0, [expert]))
        asked = dispatch([4, 4], range(spec.experts))
        whole = together(store, 0, list(range(spec.experts)))
        assert np.array_equal(part.compute(0, EXACT, **asked), whole.compute(0, EXACT, **asked))
        fit(part, store, 0, list(range(spec.experts)))
        assert (part.native(0) is None) == (whole.native(0) is None)
        fit(part, store, 0, [])


@pytest.mark.parametrize("chosen", KERNELS)
def test_what_was_let_go_takes_no_memory(store: Store, chosen: Kernels) -> None:
    """Blocks that are given up leave MLX's memory, though native code was given their layer."""
    gc.collect()
    before = mx.get_active_memory()
    part = load_partition(store, {0: np.arange(SHAPE.experts)}, detect(chosen))
    given, whole = part.native(0), mx.get_active_memory() - before
    assert whole >= part.nbytes
    for left in ([2], []):
        fit(part, store, 0, left)
        gc.collect()
        taken_now = mx.get_active_memory() - before
        assert taken_now <= whole * len(left) / SHAPE.experts * 1.1 + 4096, (chosen, left)
    del given

"""Logits against those that the transformers library computed. See tests/golden."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from expert_network.backend import detect
from expert_network.model.deferred import Experts
from expert_network.model.seam import Mode
from expert_network.model.trunk import load_trunk
from expert_network.store.convert import preprocess
from expert_network.store.reader import Store
from tests.support.together import Together, whole

GOLDEN = Path(__file__).parent.parent / "golden"
FAMILIES = sorted(path.parent.name for path in GOLDEN.glob("*/reference.npz"))
ROPE = ("rope_theta", "rope_scaling", "partial_rotary_factor", "rope_local_base_freq")

Logits = npt.NDArray[np.float32]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def store(family: str, tmp_path_factory: pytest.TempPathFactory) -> Store:
    return preprocess(GOLDEN / family, tmp_path_factory.mktemp("golden") / family)


def reference(family: str, name: str) -> npt.NDArray[Any]:
    with np.load(GOLDEN / family / "reference.npz") as arrays:
        found: npt.NDArray[Any] = arrays[name]
    return found


def logits(store: Store, family: str, experts: Experts, mode: Mode) -> Logits:
    model: Any = load_trunk(store, detect(), experts, mode)
    ids = mx.array(reference(family, "input_ids"))
    return np.array(model(ids).astype(mx.float32))


def distance(a: Logits, b: Logits) -> float:
    return float(np.abs(a - b).max())


def test_there_are_nine() -> None:
    """The four given families, and five more that make_reference.py makes."""
    assert {"deepseek_v3", "mixtral", "olmoe", "qwen3_moe"} < set(FAMILIES)
    assert len(FAMILIES) >= 7


@pytest.mark.parametrize("mode", ["exact", "sum"])
def test_one_process(family: str, store: Store, mode: Mode) -> None:
    """All experts in this process give transformers' logits."""
    found = logits(store, family, whole(store), mode)
    assert found.dtype == np.float32
    assert distance(found, reference(family, "logits")) < 1e-4


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_partitions(family: str, store: Store, count: int) -> None:
    """Experts split by a roster give the same bits in exact mode, and nearly so in sums."""
    together = Together(store, [f"node{n}" for n in range(count)])
    assert sum(part.blocks for part in together.partitions) == store.manifest.block_count
    one = logits(store, family, whole(store), "exact")
    assert np.array_equal(logits(store, family, together, "exact"), one)
    summed = logits(store, family, together, "sum")
    assert distance(summed, one) < 1e-5
    assert distance(summed, reference(family, "logits")) < 1e-4


def test_stripped_rope_keys(family: str, tmp_path: Path) -> None:
    """A config that has its rope settings under rope_parameters only gives the same logits."""
    shutil.copytree(GOLDEN / family, tmp_path / family)
    file = tmp_path / family / "config.json"
    config = json.loads(file.read_text())
    assert "rope_parameters" in config
    file.write_text(json.dumps({key: config[key] for key in config if key not in ROPE}))
    store = preprocess(tmp_path / family, tmp_path / "store")
    found = logits(store, family, whole(store), "exact")
    assert distance(found, reference(family, "logits")) < 1e-4

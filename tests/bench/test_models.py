"""The random stores of the benchmark: sound, repeatable, and of the shape that they claim."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from expert_driver.config import NetworkConfig
from expert_driver.opening import opened
from expert_network.store.convert import preprocess
from expert_network.store.reader import Store
from tests.bench.models import make_store
from tests.bench.shapes import SHAPES, Shape, shape_named
from tests.support.synthetic import Shape as CheckpointShape
from tests.support.synthetic import make_checkpoint

TINY = SHAPES["tiny"]
QWEN = Shape("tiny-qwen", "qwen3_moe", 2, 8, 2, 128, 64, 4, 2, 64, 512)


@pytest.mark.parametrize("shape", [TINY, QWEN], ids=lambda shape: shape.name)
def test_logits_are_sane(shape: Shape, tmp_path: Path) -> None:
    """A random store is sound, and its logits are finite and spread like a normed row's."""
    store = make_store(shape, tmp_path)
    assert Store.open(store).verify() == []
    ids = np.random.default_rng(0).integers(0, shape.vocab, 16).tolist()
    with opened(str(store), NetworkConfig((), False, None, None, tmp_path), False) as session:
        logits = session.engine.logits(ids)
    assert np.isfinite(logits).all()
    assert 0.5 < logits.std() < 2.0


def test_the_same_shape_gives_the_same_bytes(tmp_path: Path) -> None:
    """Two machines that make the model measure the same one."""
    one, other = (Store.open(make_store(TINY, tmp_path / name)) for name in "ab")
    assert one.digest == other.digest


def test_it_is_stored_as_a_conversion_stores_it(tmp_path: Path) -> None:
    """Layers, tensors and quantization are those of the same model's converted checkpoint."""
    shape = CheckpointShape("olmoe", 2, 8, 2, 128, 128, 2, 512)
    made = Store.open(make_store(TINY, tmp_path))
    converted = preprocess(make_checkpoint(tmp_path / "c", shape), tmp_path / "s", bits=4)
    for one, other in zip(made.manifest.layers, converted.manifest.layers, strict=True):
        assert (one.path, one.hidden, one.tensors) == (other.path, other.hidden, other.tensors)
    assert made.config["quantization"] == converted.config["quantization"]
    assert made.manifest.dtype == converted.manifest.dtype


def test_names_with_fewer_layers() -> None:
    """olmoe-2 is olmoe with 2 layers; a name that nothing has is an error."""
    assert (shape_named("olmoe-2").layers, shape_named("olmoe").layers) == (2, 16)
    with pytest.raises(KeyError):
        shape_named("gpt")

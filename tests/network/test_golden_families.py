"""Every MoE family that transformers can build, against the logits that it computed."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from expert_network.backend import detect
from expert_network.experts.partition import load_partition
from expert_network.model.trunk import load_trunk
from expert_network.store.convert import preprocess

FAMILIES = sorted((Path(__file__).parents[1] / "golden" / "families").iterdir())


@pytest.mark.parametrize("checkpoint", FAMILIES, ids=lambda path: path.name)
def test_a_store_computes_what_transformers_does(checkpoint: Path, tmp_path: Path) -> None:
    """Converted from what transformers 5 saved, a family's logits are within 1e-4 of its own."""
    backend = detect()
    store = preprocess(checkpoint, tmp_path / "store")
    everything = {layer: np.arange(experts) for layer, experts in store.manifest.shape}
    experts = load_partition(store, everything, backend)
    model = load_trunk(store, backend, experts, "exact")
    with np.load(checkpoint / "reference.npz") as reference:
        logits = np.array(model(mx.array(reference["ids"]))[0])
        np.testing.assert_allclose(logits, reference["logits"], rtol=0, atol=1e-4)

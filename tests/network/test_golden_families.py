"""Every MoE family that transformers can build, against the logits that it computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from expert_network.backend import Kernels, detect
from expert_network.experts.partition import load_partition
from expert_network.model.trunk import load_trunk
from expert_network.store.convert import preprocess

FAMILIES = sorted((Path(__file__).parents[1] / "golden" / "families").iterdir())


# With MLX's own kernels, which all of them ran with before there were others: one of each kind.
WITH_MLX = ("olmoe", "deepseek_v3", "qwen3_next", "gpt_oss")


def errors(checkpoint: Path, folder: Path, kernels: Kernels) -> npt.NDArray[np.float32]:
    """How far the logits are from the reference's."""
    backend = detect(kernels)
    store = preprocess(checkpoint, folder / "store")
    everything = {layer: np.arange(experts) for layer, experts in store.manifest.shape}
    experts = load_partition(store, everything, backend)
    model: Any = load_trunk(store, backend, experts, "exact")
    with np.load(checkpoint / "reference.npz") as reference:
        found: npt.NDArray[np.float32] = np.array(
            model(mx.array(reference["ids"]))[0].astype(mx.float32)
        )
        expected: npt.NDArray[np.float32] = reference["logits"]
    return found - expected


@pytest.mark.parametrize("checkpoint", FAMILIES, ids=lambda path: path.name)
def test_a_store_computes_what_transformers_does(checkpoint: Path, tmp_path: Path) -> None:
    """Converted from what transformers 5 saved, a family's logits are within 1e-4 of its own."""
    assert np.abs(errors(checkpoint, tmp_path, "auto")).max() <= 1e-4


@pytest.mark.skipif(not detect().native, reason="there are no others here")
@pytest.mark.parametrize("name", WITH_MLX)
def test_mlx_s_own_kernels_do(name: str, tmp_path: Path) -> None:
    """So they are with --kernels mlx, and with kernels that differ in their last bits."""
    checkpoint = next(path for path in FAMILIES if path.name.startswith(name))
    mlx = errors(checkpoint, tmp_path / "mlx", "mlx")
    assert np.abs(mlx).max() <= 1e-4
    assert not np.array_equal(mlx, errors(checkpoint, tmp_path / "native", "native"))

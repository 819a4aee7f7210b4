"""The measurement of fetching, on a tiny model."""

from __future__ import annotations

from pathlib import Path

from expert_network.progress import silent
from tests.bench import bootstrap


def test_speed(tmp_path: Path) -> None:
    """Both fetch the same blocks by turns, and leave nothing behind."""
    store = bootstrap.make_model(tmp_path, 1e5, "tiny", silent)
    before = sorted(tmp_path.iterdir())
    result = bootstrap.measure_speed(store, tmp_path, 1, silent)
    assert result["blocks"] == len(bootstrap.wanted(store)) and result["ratio"] > 0
    assert {name: len(seconds) for name, seconds in result["seconds"].items()} == {
        "fetch": 1,
        "curl": 1,
        "sha256": 1,
    }
    assert sorted(tmp_path.iterdir()) == before

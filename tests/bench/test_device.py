"""A driver over one node beside mlx-lm alone."""

from __future__ import annotations

from pathlib import Path

from expert_network.progress import silent
from tests.bench.contenders import Load
from tests.bench.device import NODE, run
from tests.bench.models import make_store
from tests.bench.peers import MLX
from tests.bench.shapes import SHAPES


def test_both_do_the_same(tmp_path: Path) -> None:
    """Both read every prompt and decode, and each claim has its ratio."""
    shape = SHAPES["tiny"]
    result = run(shape, make_store(shape, tmp_path), Load(8, 4, (16, 128), 1), 1, silent)
    measured = {(one["what"], one["variant"]) for one in result["measurements"]}
    whats = ("decode", "prefill 16", "prefill 128")
    assert measured == {(what, who) for what in whats for who in (NODE, MLX)}
    assert [claim["what"] for claim in result["claims"]] == ["decode", "prefill 128"]
    assert all(claim["ratio"]["median"] > 0 for claim in result["claims"])

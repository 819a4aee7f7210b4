"""One process and two nodes, turn by turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from expert_network.progress import silent
from tests.bench.document import pair_part
from tests.bench.models import make_store
from tests.bench.pair import run
from tests.bench.peers import ONE, TWO
from tests.bench.shapes import SHAPES


def test_both_are_measured_in_every_turn(tmp_path: Path) -> None:
    """Each gives a speed a turn, warm-up left out, and the ratio is that of the same turn."""
    shape = SHAPES["tiny"]
    result = run(shape, make_store(shape, tmp_path), 1, 2, silent)
    speeds = {(one["what"], one["variant"]): one["samples"] for one in result["measurements"]}
    assert {who for _, who in speeds} == {ONE, TWO}
    assert {len(samples) for samples in speeds.values()} == {2}
    for ratio in result["ratios"]:
        one, two = speeds[ratio["what"], ONE], speeds[ratio["what"], TWO]
        assert ratio["samples"] == pytest.approx([b / a for a, b in zip(one, two, strict=True)])
    assert {ratio["what"] for ratio in result["ratios"]} == {"decode", "prefill 512"}
    assert f"{TWO} / {ONE}" in pair_part(result)

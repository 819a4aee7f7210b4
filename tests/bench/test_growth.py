"""How a token's time is taken apart, over a real node behind a delay."""

from __future__ import annotations

from pathlib import Path

from tests.bench.growth import Growth, Plan, Token
from tests.bench.models import make_store
from tests.bench.shapes import SHAPES
from tests.support.nodes import node_process

TINY = SHAPES["tiny"]
DELAY_MS = 10.0


def test_a_delay_is_found_in_every_layer(tmp_path: Path) -> None:
    """A token waits twice the delay in each layer, which the round trip says; traffic stays."""
    store, done = make_store(TINY, tmp_path), []
    plan = Plan(contexts=(4,), delays_ms=(0.0, DELAY_MS), tokens=3, rounds=2)
    with node_process("a", "a", store) as node:
        growth = Growth(store, plan, lambda: done.append(1))
        growth.by_delay([node.port], 1)
    found = {(one.at, one.variant): one.median for one in growth.samples.series}
    assert len(done) == 4
    assert found["10", "round_trip"] >= 2 * DELAY_MS > found["0", "round_trip"]
    assert found["10", "measured"] - found["10", "attention"] >= TINY.layers * 2 * DELAY_MS
    assert found["10", "predicted"] >= TINY.layers * 2 * DELAY_MS
    assert found["10", "traffic"] == found["0", "traffic"] > 0


def test_the_model_adds_up() -> None:
    """attention + layers x (round trip + compute)."""
    token = Token(9.0, 2.0, 0.5, 0.25, 10.0, layers=8)
    assert token.predicted == 2.0 + 8 * 0.75

"""The figures that -v shows."""

from __future__ import annotations

import subprocess
import sys

import pytest

from expert_driver.figures import NetworkFigures, NodeFigures, Timing, lines

TIMING = Timing(
    prompt_tokens=30, reused=10, tokens=11, prefill_s=0.5, first_token_s=0.5, decode_s=2.0
)


def test_one_process() -> None:
    """Without nodes there are two lines of speed and one that says so."""
    assert lines(TIMING, None, 1_500_000, "sum", "native avx2, int8") == [
        "11 tokens, 5.0 tok/s; prompt 30 tokens, 10 reused, 40.0 tok/s",
        "first token after 500.0 ms; peak memory 1.5 MB",
        "experts: all in this process, sum; kernels: native avx2, int8",
    ]


def test_a_network() -> None:
    """With nodes there are latency, traffic and each node's share."""
    figures = NetworkFigures("sum", "bf16", 2, [NodeFigures("a"), NodeFigures("bee")])
    figures.count(20, 0.5, 10_000)
    for milliseconds in (1, 2, 9):
        figures.count(1, milliseconds / 1000, 500)
    figures.nodes[0] = NodeFigures("a", 4, 23, 30, 6000, 3000, 40, 8000)
    figures.nodes[1] = NodeFigures("bee", 2, 5, 10, 1500, 1000, 2, 3000)
    found = lines(TIMING, figures, 0, "sum", "mlx-cpu")
    assert all(len(line) <= 80 for line in found)
    _, _, network, computing, latency, headers, a, bee = found
    assert network == "experts: 2 nodes, sum replies, bf16 on the wire"
    assert computing == "kernels here: mlx-cpu"
    assert latency == "2.0 ms per layer (median), 1.0 KB per token"
    assert headers.split() == ["node", "pairs", "rows", "out", "in", "computing", "waiting"]
    assert a.split()[:2] == ["a", "75.0%"] and "2.0 ms" in a
    assert bee.split()[:2] == ["bee", "25.0%"] and "1.5 ms" in bee


def test_nothing_to_divide_by() -> None:
    """A reply of no token, and a node that was asked nothing, make no figures fail."""
    figures = NetworkFigures("sum", "bf16", 2, [NodeFigures("a")])
    assert "0 tokens, 0.0 tok/s" in lines(Timing(), figures, 0, "sum", "mlx-cpu")[0]


def test_reset_starts_anew() -> None:
    """After a reset the next reply is counted alone."""
    figures = NetworkFigures("sum", "bf16", 2, [NodeFigures("a", dispatches=4)])
    figures.count(1, 1.0, 500)
    figures.reset()
    assert figures == NetworkFigures("sum", "bf16", 2, [NodeFigures("a")])


@pytest.mark.parametrize("module", ["figures", "dispatch.network", "dispatch.gathering", "demo"])
def test_no_mlx_for_what_computes_nothing(module: str) -> None:
    """Figures, links and the demo's words are there before MLX is, or without it."""
    code = f"import sys, expert_driver.{module}; sys.exit('mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""`expert-net bench` in one process and over a real node, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from expert_driver.cli import main
from tests.bench.models import make_store
from tests.bench.shapes import SHAPES
from tests.driver.test_trace import check_nesting, read, tracks
from tests.support.nodes import node_process

TINY = SHAPES["tiny"]
SHORT = (
    "--contexts",
    "8",
    "--prompts",
    "8,16",
    "--tokens",
    "2",
    "--rounds",
    "2",
    "--dispatches",
    "3",
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(TINY, tmp_path_factory.mktemp("models"))


def measured(capsys: pytest.CaptureFixture[str], *words: str | Path) -> Any:
    """What `expert-net bench WORDS --json` prints."""
    assert main(["bench", *map(str, words), *SHORT, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def names(report: Any) -> list[tuple[str, str]]:
    return [(found["what"], found["at"]) for found in report["measurements"]]


def test_in_one_process(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every length is read, contexts are decoded at, kernels measured: once in each round."""
    report = measured(capsys, store)
    found = names(report)
    assert found[:3] == [
        ("prefill", "8 tokens"),
        ("decode", "8 tokens"),
        ("prefill", "16 tokens"),
    ]
    assert {what for what, _ in found[3:]} <= {"memory", "experts", "experts / memory"}
    assert "experts" in {what for what, _ in found}
    assert all(series["count"] == 2 for series in report["measurements"])
    assert all(series["least"] > 0 for series in report["measurements"])
    assert report["conditions"]["cores"] >= 1 and report["conditions"]["packages"]["mlx"]
    assert report["subject"]["per_token"] == TINY.per_token
    assert report["ratios"] == []


def test_over_nodes_in_turns(
    store: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Over nodes, dispatches and traffic are measured, for each variant, with ratios to the first;
    int8 rows are fewer bytes than f32 ones. --trace has the passes of them all. In exact mode,
    where nothing is summed, dispatches are measured too."""
    trace = tmp_path / "trace.json"
    with node_process("a", "a", store) as node:
        compared = ("--compare", "wire=f32,int8", "--trace", trace)
        report = measured(capsys, store, "--nodes", node.url, *compared)
        exact = measured(capsys, store, "--nodes", node.url, "--exact", "--only", "dispatch")
    assert {what for what, _ in names(exact)} == {
        *("dispatch", "of it computing", "of it overhead", "ping")
    }
    shown = tracks(read(trace))
    for events in shown.values():
        check_nesting(events)
    named = [event["name"] for event in shown["driver"]]
    assert named.count("prompt") == 2 * (2 * 2 + 1) and named.count("token") >= 2 * 2 * 2
    found = names(report)
    assert {"dispatch", "of it computing", "of it overhead", "ping", "traffic"} <= {
        what for what, _ in found
    }
    assert report["variants"] == ["f32", "int8"]
    assert report["subject"]["nodes"] == ["a"]
    ratios = {series["what"]: series for series in report["ratios"]}
    assert ratios["traffic"]["variant"] == "int8 / f32"
    assert ratios["traffic"]["most"] < 0.6


def test_only_some_parts_as_a_table(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--only leaves the others out; without --json a person gets conditions and a table."""
    assert main(["bench", str(store), *SHORT, "--only", "decode"]) == 0
    shown = capsys.readouterr().out
    assert "cores" in shown and "warm-up" in shown and "decode" in shown
    assert "prefill" not in shown and "experts   " not in shown


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--contexts", "8,x"), "is not a list of lengths"),
        (("--contexts", "0"), "is not a list of lengths"),
        (("--compare", "wire=bf16"), "does not name two values to compare"),
        (("--compare", "wire=bf16,bf16"), "does not name two values to compare"),
        (("--compare", "colour=red,blue"), "does not name two values to compare"),
    ],
)
def test_what_cannot_be_measured(
    words: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A list or a comparison that says nothing is a usage error."""
    assert main(["bench", "somewhere", *words]) == 2
    assert sentence in capsys.readouterr().err

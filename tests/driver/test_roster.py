"""`expert-net roster diff`, through the program's own entry."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from expert_driver.cli import main
from expert_network.store.manifest import FileSpec, LayerSpec, Manifest, TensorSpec, align

SHAPE = ["--layers", "16", "--experts", "64"]


def test_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    """A person sees each node before and after, each move with its share, and one sentence."""
    assert main(["roster", "diff", "a=64,b=16", "a=64,b=16,c=20", *SHAPE]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in (
        "a 820 654 -166 0",
        "c 0 207 +207 207",
        "a -> c 166 16.2 %",
        "b -> c 41 4.0 %",
        "207 of 1,024 blocks move (20.2 %); 817 stay.",
    ):
        assert line in lines


def test_json_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON has both rosters with their digests, the counts, every node and every move."""
    assert main(["roster", "diff", "a=64,b=16", "a=64,b=16,c=20", *SHAPE, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["old"]["digest"].startswith("b1c5b969")
    assert told["new"]["nodes"] == [["a", 64.0], ["b", 16.0], ["c", 20.0]]
    assert [told[key] for key in ("blocks", "copies", "kept", "moved")] == [1024, 1024, 817, 207]
    assert told["nodes"][2] == {"name": "c", "before": 0, "after": 207, "fetched": 207}
    assert told["moves"] == [
        {"source": "a", "target": "c", "copies": 166},
        {"source": "b", "target": "c", "copies": 41},
    ]
    assert "bytes" not in told


def test_a_roster_that_stays(capsys: pytest.CaptureFixture[str]) -> None:
    """The same roster in another order moves nothing, and no table of moves is shown."""
    assert main(["roster", "diff", "a,b", "b,a", *SHAPE]) == 0
    out = capsys.readouterr().out
    assert "0 of 1,024 blocks move (0.0 %); 1,024 stay." in out
    assert "->" not in out


def test_replicas_count_copies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With replicas, from a file or for both, copies are counted and the sentence says so."""
    file = tmp_path / "new.toml"
    file.write_text("replicas = 2\n[nodes]\na = 1\nb = 1\n")
    assert main(["roster", "diff", "a,b", str(file), *SHAPE]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "1,024 of 2,048 copies move (50.0 %); 1,024 stay." in out
    assert "replicas: 1 before and 2 after." in out
    assert main(["roster", "diff", "a,b", str(file), *SHAPE, "--replicas", "2"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "0 of 2,048 copies move (0.0 %); 2,048 stay." in out
    assert "replicas: 2." in out


def write_manifest(store: Path) -> None:
    """A store of which only the manifest is there: a layer of 8 small blocks, one of 4 larger."""
    files = {name: FileSpec(1, "0" * 64) for name in ("config.json", "trunk.safetensors")}
    layers = []
    for layer, experts, count in ((1, 8, 100), (3, 4, 1000)):
        tensor = TensorSpec("gate_proj.weight", "uint8", (count,), 0, count)
        stride, hashes = align(count, 16384), ("0" * 64,) * experts
        path = f"model.layers.{layer}.mlp"
        layers.append(LayerSpec(layer, path, experts, count, (tensor,), count, stride, hashes))
    store.mkdir(parents=True)
    manifest = Manifest("olmoe", "bfloat16", tuple(layers), files)
    (store / "manifest.json").write_bytes(manifest.to_bytes())


def test_a_store_gives_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a store, by path or by name, layers of unlike blocks add up to bytes that move."""
    write_manifest(tmp_path / "models" / "tiny")
    by_path = ["--store", str(tmp_path / "models" / "tiny")]
    by_name = ["--store", "tiny", "--home", str(tmp_path)]
    for where in (by_path, by_name):
        assert main(["roster", "diff", "a", "b", *where, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["moves"] == [{"source": "a", "target": "b", "copies": 12, "bytes": 4800}]
        assert told["bytes"] == 4800
    assert main(["roster", "diff", "a", "b", *by_path]) == 0
    out = capsys.readouterr().out
    assert "12 of 12 blocks move (100.0 %, 4.8 KB); 0 stay." in out
    assert "a -> b" in out


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["a,b", "a,b,a", *SHAPE], 3, "error: the roster names node 'a' twice"),
        (["a,b", "no.toml", *SHAPE], 3, "error: the roster file no.toml cannot be read"),
        (["a,b", "", *SHAPE], 3, "error: the roster is empty"),
        (["a", "b", *SHAPE, "--replicas", "2"], 3, "error: replicas is 2 and the roster names 1"),
        (["a", "b"], 2, "--store STORE, or --layers N and --experts N"),
        (["a", "b", "--layers", "2"], 2, "--store STORE, or --layers N and --experts N"),
        (["a", "b", "--store", "s", *SHAPE], 2, "--store STORE, or --layers N and --experts N"),
        (["a", "b", "--layers", "0", "--experts", "1"], 2, "0 is not in the range"),
        (["a", "b", "--store", "./none"], 3, "error: none: there is no such folder"),
        (["a"], 2, "Missing argument 'NEW'"),
    ],
)
def test_bad_input(
    arguments: list[str], code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rosters, stores and options that cannot be used get one sentence and their exit code."""
    assert main(["roster", "diff", *arguments]) == code
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert captured.out == ""

"""`expert-net preprocess`, `verify` and `models`: what is printed, and what bad input gets."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from expert_driver import conversion
from expert_driver.cli import main
from expert_network.progress import Progress
from expert_network.store.reader import Store
from expert_network.units import size
from tests.support.small_disk import small_disk
from tests.support.stores import flip, write_store
from tests.support.synthetic import Shape, add_tokenizer, make_checkpoint

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = make_checkpoint(tmp_path / "checkpoint", Shape("olmoe"), shard_bytes=200_000)
    add_tokenizer(path)
    return path


def run(*words: str | Path) -> int:
    return main([str(word) for word in words])


# --- preprocess


def test_preprocess_sums_up(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The summary names what was made and the command to type next; progress is on stderr."""
    assert run("preprocess", checkpoint, tmp_path / "store", "--bits", "4") == 0
    out, err = capsys.readouterr()
    store = Store.open(tmp_path / "store")
    assert out.splitlines() == [
        f"store       {tmp_path}/store",
        "model       olmoe, 4-bit affine, groups of 64",
        "MoE layers  2, of 8 experts",
        "blocks      16, 6.9 KB each",
        "trunk       43.0 KB",
        f"total       {size(store.manifest.total_bytes)}",
        f"digest      {store.digest}",
        f"next        expert-net {tmp_path}/store --chat",
    ]
    assert "converting" in err


def test_a_store_in_the_models_folder_is_called_by_name(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next command is as short as it can be, and works without a tokenizer too."""
    (checkpoint / "tokenizer.json").unlink()
    out = tmp_path / "home" / "models" / "my story"
    assert run("preprocess", checkpoint, out, "--home", tmp_path / "home") == 0
    out_text, err = capsys.readouterr()
    assert out_text.splitlines()[-1] == (
        "next        expert-net logits 'my story' --ids 1,2,3 -o logits.npy"
    )
    assert f"warning: {checkpoint} has no tokenizer" in err


def test_a_group_size_needs_bits(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--group-size alone is a mistake and not something that is silently ignored."""
    assert run("preprocess", checkpoint, tmp_path / "store", "--group-size", "32") == 2
    assert "only together with --bits" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--bits", "5"], ["--bits", "4", "--group-size", "16"]])
def test_other_widths_are_refused(checkpoint: Path, tmp_path: Path, option: list[str]) -> None:
    """Only what MLX computes with, and we have tried, can be chosen."""
    assert run("preprocess", checkpoint, tmp_path / "store", *option) == 2


def edit_config(checkpoint: Path, **entries: object) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | entries))


def first_shard(checkpoint: Path) -> Path:
    return sorted(checkpoint.glob("*.safetensors"))[0]


def not_moe(checkpoint: Path) -> None:
    """A dense Llama of two layers."""
    for path in checkpoint.iterdir():
        path.unlink()
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models.llama import Model, ModelArgs

    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "rms_norm_eps": 1e-5,
        "vocab_size": 64,
    }
    (checkpoint / "config.json").write_text(json.dumps(config))
    args: Any = ModelArgs
    weights = tree_flatten(Model(args.from_dict(config)).parameters(), destination={})
    mx.save_safetensors(str(checkpoint / "model.safetensors"), dict(weights))


def no_shards(checkpoint: Path) -> None:
    for path in checkpoint.glob("*.safetensors*"):
        path.unlink()


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "a shard cut short": (
        lambda path: os.truncate(first_shard(path), first_shard(path).stat().st_size - 100),
        "truncated",
    ),
    "a shard cut in its header": (lambda path: os.truncate(first_shard(path), 50), "truncated"),
    "a missing shard": (lambda path: first_shard(path).unlink(), "shards missing: model-00001-of"),
    "no shard": (no_shards, "no safetensors files"),
    "no config": (lambda path: (path / "config.json").unlink(), r"there is no config.json"),
    "a broken config": (lambda path: (path / "config.json").write_text("{"), "as JSON"),
    "an unknown model_type": (
        lambda path: edit_config(path, model_type="gpt_moe_x"),
        "mlx-lm knows no model_type 'gpt_moe_x'",
    ),
    "code in the config": (
        lambda path: edit_config(path, auto_map={"AutoModel": "modeling.M"}),
        "asks to run code of its own ('auto_map')",
    ),
    "a model file": (
        lambda path: edit_config(path, model_file="model.py"),
        "asks to run code of its own ('model_file')",
    ),
    "no mixture of experts": (not_moe, "this llama is not a mixture-of-experts model"),
    "weights of another shape": (
        lambda path: edit_config(path, hidden_size=128),
        "config and weights do not fit together",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_checkpoint_gets_a_sentence(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    """Whatever is wrong with a checkpoint: one sentence, exit code 3, nothing left behind."""
    spoil, sentence = BAD[what]
    spoil(checkpoint)
    assert run("preprocess", checkpoint, tmp_path / "store") == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert str(checkpoint) in err
    assert sentence in err
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_path_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A source that does not exist is named."""
    assert run("preprocess", tmp_path / "nothing", tmp_path / "store") == 3
    assert f"{tmp_path}/nothing: no such folder" in capsys.readouterr().err


def test_no_room_gets_a_sentence(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk without room: what is needed, what is free, exit code 5, nothing left behind."""
    with small_disk(tmp_path / "disk", 1_000_000) as disk:
        assert run("preprocess", checkpoint, disk / "store") == 5
        assert "is needed and" in capsys.readouterr().err
        assert list(disk.iterdir()) == []


def test_ctrl_c_says_how_to_go_on(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An interrupted conversion ends with 130, says that the same command goes on, and it does."""

    @contextmanager
    def interrupting() -> Iterator[Progress]:
        def report(done: int, total: int, what: str) -> None:
            if done > 200_000:  # in the second layer
                raise KeyboardInterrupt

        yield report

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "progress", interrupting)
        assert run("preprocess", checkpoint, tmp_path / "store") == 130
    assert "the same command goes on from the last finished layer" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()
    assert (tmp_path / "store.partial").exists()
    assert run("preprocess", checkpoint, tmp_path / "store") == 0
    assert run("verify", tmp_path / "store") == 0


# --- verify


def test_a_sound_store_verifies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sound store is said to be so, with its digest."""
    manifest = write_store(tmp_path / "store")
    assert run("verify", tmp_path / "store") == 0
    out, err = capsys.readouterr()
    assert out == (
        f"{tmp_path}/store is sound: 6 blocks and 2 files, 197.6 KB, digest {manifest.digest}\n"
    )
    assert "verifying" in err


def test_a_store_is_found_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name means a store in the models folder."""
    write_store(tmp_path / "models" / "story")
    assert run("verify", "story", "--home", tmp_path) == 0
    assert "models/story is sound" in capsys.readouterr().out


def test_each_damage_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A flipped byte and a missing layer file are both named; the exit code is 3."""
    write_store(tmp_path / "store")
    flip(tmp_path / "store/bin/layer_00.bin", 40000)
    (tmp_path / "store/bin/layer_01.bin").unlink()
    assert run("verify", tmp_path / "store") == 3
    out, err = capsys.readouterr()
    assert out == f"{tmp_path}/store is damaged: 2 problems\n"
    assert "error: " + f"{tmp_path}/store/bin/layer_01.bin: the file is missing" in err
    assert "layer_00.bin: block (0, 1) at offset 32768 does not match its sha256" in err


def test_another_version_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A store of another format version: both versions, and what to do."""
    write_store(tmp_path / "store")
    manifest = tmp_path / "store/manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"version":1', b'"version":7'))
    assert run("verify", tmp_path / "store") == 3
    err = capsys.readouterr().err
    assert "format version 7 and this program reads version 1; upgrade expert-network" in err


def test_what_is_no_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint is not a store, and the sentence says how it becomes one."""
    assert run("verify", GOLDEN / "olmoe", "--home", tmp_path) == 3
    assert "this is a checkpoint, not a store; convert it first" in capsys.readouterr().err

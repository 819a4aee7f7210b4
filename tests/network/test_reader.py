"""Reading a store: what a sound one gives, and what each damage is called."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from expert_network.errors import ConfigRefused, StoreCorrupt, StoreError
from expert_network.store.manifest import MANIFEST, Manifest
from expert_network.store.reader import Store
from tests.support.stores import block, flip, write_store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_store(tmp_path / "store", files={"tokenizer.json": b"{}"})
    return tmp_path / "store"


def test_a_sound_store_opens(path: Path) -> None:
    """A store tells its config, its digest and whether it has a tokenizer."""
    store = Store.open(path)
    assert store.config == {"model_type": "made_up"}
    assert store.digest == Manifest.from_bytes((path / MANIFEST).read_bytes(), path).digest
    assert store.has_tokenizer
    assert store.trunk_path.stat().st_size == 1000
    assert store.verify() == []


def test_a_tokenizers_config_is_no_tokenizer(tmp_path: Path) -> None:
    """Only a vocabulary makes a tokenizer."""
    write_store(tmp_path / "store", files={"tokenizer_config.json": b"{}"})
    assert not Store.open(tmp_path / "store").has_tokenizer


def test_blocks_are_read_as_they_were_written(path: Path) -> None:
    """Every block comes back, in fresh memory or in what the caller gives."""
    store = Store.open(path)
    for layer, experts in store.manifest.shape:
        for expert in range(experts):
            assert store.read_block(layer, expert) == block(layer, expert)
    out = memoryview(bytearray(store.manifest.layer(0).block_bytes + 5))
    view = store.read_block(0, 1, out)
    assert view == out[:-5] == block(0, 1)


@pytest.mark.parametrize(("layer", "expert"), [(2, 0), (0, 3), (0, -1)])
def test_a_block_that_is_not_there(path: Path, layer: int, expert: int) -> None:
    """Asking for a block the model does not have is a KeyError, not another block's bytes."""
    with pytest.raises(KeyError):
        Store.open(path).read_block(layer, expert)


def test_many_threads_may_read(path: Path) -> None:
    """A store holds no position in a file: threads do not disturb each other."""
    store = Store.open(path)
    wrong: list[tuple[int, int]] = []

    def read(layer: int, expert: int) -> None:
        for _ in range(50):
            if store.read_block(layer, expert, verify=False) != block(layer, expert):
                wrong.append((layer, expert))

    threads = [threading.Thread(target=read, args=(n, e)) for n in (0, 1) for e in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_flipped_byte_is_found_and_placed(path: Path) -> None:
    """One changed byte is named by file, block and offset, and the other blocks still read."""
    store = Store.open(path)
    flip(path / "bin/layer_01.bin", 2 * 32768 + 17)
    with pytest.raises(StoreCorrupt, match=r"layer_01\.bin: block \(1, 2\) at offset 65536 does"):
        store.read_block(1, 2)
    assert store.read_block(1, 2, verify=False) != block(1, 2)
    assert [str(problem) for problem in store.verify()] == [
        f"{path}/bin/layer_01.bin: block (1, 2) at offset 65536 does not match its sha256; convert "
        "the checkpoint again or fetch the store from a peer."
    ]


def test_bytes_between_blocks_must_be_zero(path: Path) -> None:
    """The padding after a block belongs to the layout, so verifying looks at it too."""
    flip(path / "bin/layer_00.bin", 32767)
    problems = [str(problem) for problem in Store.open(path).verify()]
    assert len(problems) == 1
    assert "block (0, 0) at offset 0 is followed by bytes that are not zero" in problems[0]


@pytest.mark.parametrize("name", ["trunk.safetensors", "tokenizer.json"])
def test_a_changed_file_is_found(path: Path, name: str) -> None:
    """A file whose bytes changed is named, once."""
    flip(path / name, 1)
    (problem,) = Store.open(path).verify()
    assert str(problem).startswith(f"{path / name}: the file does not match its sha256")


def test_a_changed_config_is_refused_at_once(path: Path) -> None:
    """The config decides what is built, so it is checked before it is used."""
    flip(path / "config.json", 3)
    with pytest.raises(StoreCorrupt, match="does not match its sha256"):
        Store.open(path)


@pytest.mark.parametrize("name", ["bin/layer_01.bin", "trunk.safetensors", "tokenizer.json"])
def test_a_missing_file_is_refused(path: Path, name: str) -> None:
    """A store that lacks a file does not open, and says which."""
    (path / name).unlink()
    with pytest.raises(StoreCorrupt, match="the file is missing") as caught:
        Store.open(path)
    assert caught.value.path == path / name


def test_a_file_cut_short_is_refused(path: Path) -> None:
    """Sizes are compared on opening, without reading the file."""
    os.truncate(path / "bin/layer_01.bin", 70000)
    with pytest.raises(StoreCorrupt, match="it has 70000 bytes where the manifest says 98304"):
        Store.open(path)


def test_everything_that_is_wrong_is_listed(path: Path) -> None:
    """Verifying goes on after the first problem, and names a missing file once."""
    (path / "tokenizer.json").unlink()
    (path / "bin/layer_00.bin").unlink()
    os.truncate(path / "bin/layer_01.bin", 70000)
    flip(path / "bin/layer_01.bin", 40000)
    problems = [str(problem) for problem in Store.open_unchecked(path).verify()]
    assert [problem.removeprefix(f"{path}/").split(";")[0] for problem in problems] == [
        "tokenizer.json: the file is missing",
        "bin/layer_00.bin: the file is missing",
        "bin/layer_01.bin: it has 70000 bytes where the manifest says 98304",
        "bin/layer_01.bin: block (1, 1) at offset 32768 does not match its sha256",
        "bin/layer_01.bin: block (1, 2) at offset 65536 is cut short",
    ]


def test_progress_covers_every_byte(path: Path) -> None:
    """Verifying reports rising bytes up to the size of all files."""
    store = Store.open(path)
    seen: list[tuple[int, int]] = []
    store.verify(lambda done, total, what: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == (store.manifest.total_bytes, store.manifest.total_bytes)


def test_a_driver_needs_no_blocks(path: Path) -> None:
    """A copy of trunk and tokenizer opens as such, and verifies what it has."""
    for file in (path / "bin").iterdir():
        file.unlink()
    (path / "bin").rmdir()
    store = Store.open(path, blocks=False)
    assert store.verify() == []
    with pytest.raises(StoreCorrupt, match="the file is missing"):
        store.read_block(0, 0)


def test_a_sparse_part_verifies_as_a_part(path: Path) -> None:
    """A file with only some blocks has the same size and offsets; only those are looked at."""
    with (path / "bin/layer_00.bin").open("r+b") as file:
        file.write(bytes(32768))
    store = Store.open(path)
    assert store.verify(only={0: [1, 2], 1: {0}}) == []
    assert store.read_block(0, 2) == block(0, 2)
    assert len(store.verify(only={0: [0]})) == 1


@pytest.mark.parametrize("entry", ["auto_map", "model_file"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_config_that_runs_code_is_refused(tmp_path: Path, name: str, entry: str) -> None:
    """A store's configs may not name code, wherever in them, and the entry is named."""
    config: dict[str, object] = {"text_config": {entry: "modeling.py"}}
    files = {"tokenizer_config.json": b'{"text_config":{"%s":"x"}}' % entry.encode()}
    here = name == "config.json"
    write_store(tmp_path / "s", config=config if here else None, files={} if here else files)
    with pytest.raises(ConfigRefused, match=f"{name} asks to run code of its own .'{entry}'"):
        Store.open(tmp_path / "s")


@pytest.mark.parametrize("content", [b"[1]", b"{", b"[" * 99999])
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, content: bytes) -> None:
    """A config that matches its sha256 and still is no JSON object is a StoreError."""
    write_store(tmp_path / "s", files={"tokenizer_config.json": content})
    with pytest.raises(StoreError, match=r"not JSON|not a JSON object"):
        Store.open(tmp_path / "s")


def test_what_is_not_a_store(tmp_path: Path) -> None:
    """Nothing there, a checkpoint, and any other folder each get their own sentence."""
    with pytest.raises(StoreError, match="there is no such store"):
        Store.open(tmp_path / "nowhere")
    with pytest.raises(StoreError, match=r"this is not a store, it has no manifest\.json"):
        Store.open(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(StoreError, match="a checkpoint, not a store; convert it first: expert-net"):
        Store.open(tmp_path)
    with pytest.raises(StoreError, match="not a store"):
        Store.open(tmp_path / "config.json")

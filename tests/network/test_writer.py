"""Writing a store: whole or not at all, one writer at a time, gone on with after a crash."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from expert_network import places
from expert_network.errors import DiskFull, StoreError
from expert_network.store.manifest import LayerSpec, Manifest, align
from expert_network.store.reader import Store
from expert_network.store.writer import StoreWriter
from tests.support.small_disk import small_disk
from tests.support.stores import block, layer_spec


def plan(layer: int, experts: int = 3) -> LayerSpec:
    """A layer as a conversion plans it, without sha256."""
    return replace(layer_spec(layer, experts), sha256=())


def write_layer(writer: StoreWriter, spec: LayerSpec) -> LayerSpec:
    with writer.layer(spec) as file:
        for expert in reversed(range(spec.experts)):
            data = memoryview(block(spec.layer, expert))
            for tensor in spec.tensors:
                file.put(expert, tensor, data[tensor.offset : tensor.offset + tensor.nbytes])
        return writer.finish_layer(file)


def finish(writer: StoreWriter, layers: list[LayerSpec]) -> Path:
    files = {
        "config.json": writer.add("config.json", [b'{"model_type":', b'"made_up"}']),
        "trunk.safetensors": writer.add("trunk.safetensors", [memoryview(bytes(100))]),
    }
    return writer.finish(Manifest("made_up", "bfloat16", tuple(layers), files))


def test_it_stands_whole_or_not_at_all(tmp_path: Path) -> None:
    """Until the last rename nothing is at OUT; after it nothing else is left."""
    out = tmp_path / "deep" / "store"
    with StoreWriter(out, "f") as writer:
        layers = [write_layer(writer, plan(layer)) for layer in (0, 1)]
        assert not out.exists()
        finish(writer, layers)
    store = Store.open(out)
    assert store.verify() == []
    assert store.manifest.layers == (layer_spec(0, 3), layer_spec(1, 3))
    assert store.manifest.files["config.json"].sha256 == (
        hashlib.sha256(b'{"model_type":"made_up"}').hexdigest()
    )
    assert [path.name for path in out.parent.iterdir()] == ["store"]


def test_a_working_folder_is_never_a_store(tmp_path: Path) -> None:
    """Even a manifest that was written just before a crash makes no store of it."""
    writer = StoreWriter(tmp_path / "models" / "store", "f")
    with pytest.raises(InterruptedError), writer:
        write_layer(writer, plan(0))
        (work,) = (tmp_path / "models").iterdir()
        for folder in (work, work / "store.partial"):
            (folder / "manifest.json").write_text("{}")
        raise InterruptedError
    assert places.stores(tmp_path) == []


def test_an_error_before_the_first_layer_leaves_nothing(tmp_path: Path) -> None:
    """With nothing to go on from, the working folder is removed."""
    with (
        pytest.raises(ZeroDivisionError),
        StoreWriter(tmp_path / "store", "f") as writer,
        writer.layer(plan(0)) as file,
    ):
        file.put(0, file.spec.tensors[0], memoryview(bytes(file.spec.tensors[0].nbytes)))
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_finished_layer_is_gone_on_from(tmp_path: Path) -> None:
    """A later run of the same conversion finds what was finished, and only that."""
    with pytest.raises(ZeroDivisionError), StoreWriter(tmp_path / "store", "f") as writer:
        write_layer(writer, plan(0))
        with writer.layer(plan(1)):
            raise ZeroDivisionError
    with StoreWriter(tmp_path / "store", "f") as writer:
        assert writer.finished(plan(0)) == layer_spec(0, 3)
        assert writer.finished(plan(1)) is None
        assert writer.finished(plan(0, experts=4)) is None
        finish(writer, [layer_spec(0, 3), write_layer(writer, plan(1))])
    assert Store.open(tmp_path / "store").verify() == []


@pytest.mark.parametrize("note", ["5", "null", '{"a":1}', '["zz"]', "[", "[" * 100_000, "short"])
def test_a_damaged_note_is_not_trusted(tmp_path: Path, note: str) -> None:
    """A layer whose note is not the sha256 of its blocks counts as unfinished."""
    with pytest.raises(ZeroDivisionError), StoreWriter(tmp_path / "store", "f") as writer:
        write_layer(writer, plan(0))
        raise ZeroDivisionError
    (path,) = (tmp_path / "store.partial").glob("*.json")
    text = json.dumps(json.loads(path.read_text())[:-1]) if note == "short" else note
    path.write_text(text)
    with StoreWriter(tmp_path / "store", "f") as writer:
        assert writer.finished(plan(0)) is None
        finish(writer, [write_layer(writer, plan(0))])
    assert Store.open(tmp_path / "store").verify() == []


@pytest.mark.parametrize("where", ["block", "padding", "end"])
def test_a_damaged_layer_is_not_trusted(tmp_path: Path, where: str) -> None:
    """A layer file that changed after it was finished counts as unfinished."""
    spec = plan(0)
    with pytest.raises(ZeroDivisionError), StoreWriter(tmp_path / "store", "f") as writer:
        write_layer(writer, spec)
        raise ZeroDivisionError
    (path,) = (tmp_path / "store.partial").rglob("*.bin")
    data = bytearray(path.read_bytes())
    data[{"block": 5, "padding": spec.block_bytes, "end": -1}[where]] ^= 1
    path.write_bytes(data)
    with StoreWriter(tmp_path / "store", "f") as writer:
        assert writer.finished(spec) is None
        finish(writer, [write_layer(writer, spec)])
    assert Store.open(tmp_path / "store").verify() == []


def test_a_manifest_that_could_not_be_read_is_not_published(tmp_path: Path) -> None:
    """A store whose manifest no reader would take never stands at OUT."""
    with (
        pytest.raises(StoreError, match="the manifest is damaged"),
        StoreWriter(tmp_path / "store", "f") as writer,
    ):
        finish(writer, [replace(write_layer(writer, plan(0)), sha256=("zz",) * 3)])
    assert not (tmp_path / "store").exists()


def test_another_conversion_starts_over(tmp_path: Path) -> None:
    """Layers of another source or of other options are thrown away."""
    with pytest.raises(ZeroDivisionError), StoreWriter(tmp_path / "store", "one") as writer:
        write_layer(writer, plan(0))
        raise ZeroDivisionError
    with StoreWriter(tmp_path / "store", "two") as writer:
        assert writer.finished(plan(0)) is None
        assert not any((tmp_path / "store.partial").rglob("*.bin"))
    with StoreWriter(tmp_path / "store", "one") as writer:
        assert writer.finished(plan(0)) is None


def test_what_a_killed_run_left_does_not_get_in(tmp_path: Path) -> None:
    """Files under temporary names are not part of the finished store."""
    with StoreWriter(tmp_path / "store", "f") as writer:
        layer = write_layer(writer, plan(0))
        bin_folder = tmp_path / "store.partial" / "store.partial" / "bin"
        (bin_folder / "layer_07.bin.tmp").write_bytes(b"x")
        out = finish(writer, [layer])
    assert sorted(path.name for path in out.rglob("*") if path.is_file()) == [
        "config.json",
        "layer_00.bin",
        "manifest.json",
        "trunk.safetensors",
    ]


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    """A second conversion into the same place is told so, and disturbs nothing."""
    with StoreWriter(tmp_path / "store", "f") as writer:
        layer = write_layer(writer, plan(0))
        for fingerprint in ("f", "another"):
            with pytest.raises(StoreError, match="another process is writing this store now"):
                StoreWriter(tmp_path / "store", fingerprint).__enter__()
        finish(writer, [layer])
    assert Store.open(tmp_path / "store").verify() == []


def test_a_place_that_is_taken(tmp_path: Path) -> None:
    """A store, a folder with something in it and a file are never written over."""
    with StoreWriter(tmp_path / "store", "f") as writer:
        finish(writer, [write_layer(writer, plan(0))])
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x").touch()
    (tmp_path / "file").touch()
    for name, sentence in [
        ("store", "a store stands here already"),
        ("folder", "this folder is not empty"),
        ("file", "this is a file"),
    ]:
        with pytest.raises(StoreError, match=sentence):
            StoreWriter(tmp_path / name, "f").__enter__()
        assert not (tmp_path / f"{name}.partial").exists()


def test_a_place_that_no_folder_can_be_renamed_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link and the current directory are refused before anything is written."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("link", "dangling"):
        with pytest.raises(StoreError, match="this is a symbolic link; name the folder itself"):
            StoreWriter(tmp_path / name, "f").__enter__()
    monkeypatch.chdir(tmp_path / "empty")
    for here in (Path(), tmp_path / "empty"):
        with pytest.raises(StoreError, match="this is the current directory"):
            StoreWriter(here, "f").__enter__()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "empty", "link"]


def test_an_empty_folder_may_be_filled(tmp_path: Path) -> None:
    """A folder made beforehand is used."""
    (tmp_path / "store").mkdir()
    with StoreWriter(tmp_path / "store", "f") as writer:
        finish(writer, [write_layer(writer, plan(0))])
    assert Store.open(tmp_path / "store").verify() == []


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    """What the system refuses is said in a sentence."""
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"it cannot be written \(Not a directory\)"):
        StoreWriter(tmp_path / "file" / "store", "f").__enter__()


def test_a_tensor_of_the_wrong_size_is_refused(tmp_path: Path) -> None:
    """A tensor never spills into its neighbour."""
    with (
        StoreWriter(tmp_path / "store", "f") as writer,
        pytest.raises(ValueError, match="has 5 bytes, not"),
        writer.layer(plan(0)) as file,
    ):
        file.put(0, file.spec.tensors[0], memoryview(bytes(5)))


def test_too_little_room_is_told_beforehand(tmp_path: Path) -> None:
    """A store that will not fit is refused before a byte of it is written."""
    with pytest.raises(DiskFull) as caught, StoreWriter(tmp_path / "store", "f") as writer:
        writer.reserve(10**18)
    assert caught.value.needed == 10**18
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    """A full disk is a DiskFull; finished layers stay, and with room again the run goes on."""
    spec = plan(0)
    stored = spec.experts * align(spec.block_bytes, 4096)  # a sparse file has no padding on disk
    with small_disk(tmp_path / "disk", int(1.5 * stored)) as disk:
        (disk / "ballast").write_bytes(bytes(8192))
        with pytest.raises(DiskFull) as caught, StoreWriter(disk / "store", "f") as writer:
            write_layer(writer, spec)
            write_layer(writer, plan(1))
        assert "the disk is full" in str(caught.value)
        assert not (disk / "store").exists()
        files = [path.name for path in (disk / "store.partial").rglob("*") if path.is_file()]
        assert sorted(files) == ["fingerprint", "layer_00.bin", "layer_00.bin.json"]
        (disk / "ballast").unlink()
        with StoreWriter(disk / "store", "f") as writer:
            writer.reserve(stored + 1000)
            done = writer.finished(spec)
            assert done is not None
            finish(writer, [done])
        assert Store.open(disk / "store").verify() == []

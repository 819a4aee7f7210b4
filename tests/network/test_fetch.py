"""expert_network.net.fetch and .download"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from expert_network.errors import (
    ConfigRefused,
    DiskFull,
    ExpertNetworkError,
    KeyRefused,
    NetworkMismatch,
    NodeClosed,
    NodeRefused,
    NodeTimeout,
    NodeUnreachable,
    StoreCorrupt,
    StoreError,
)
from expert_network.net import fetch as module
from expert_network.net.auth import ClusterKey
from expert_network.net.control import ControlClient
from expert_network.net.download import download
from expert_network.net.fetch import fetch_store
from expert_network.store.manifest import FileSpec, Manifest
from expert_network.store.reader import Store
from tests.support.peers import (
    Fault,
    corrupt,
    cut_after,
    refuse,
    serving_store,
    stall_after,
    too_long,
    without_range,
    wrong_part,
)
from tests.support.servers import unused_port
from tests.support.small_disk import small_disk
from tests.support.stores import flip, write_store

KEY = ClusterKey.from_text("0f" * 32)
DATA = random.Random(1).randbytes(300_000)
SPEC = FileSpec(len(DATA), hashlib.sha256(DATA).hexdigest())
SOON = 0.2  # seconds: a deadline that is meant to pass
TRUNK = "/file/trunk.safetensors"


class Model:
    """A store to fetch from, and a place to fetch it to."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "source"
        words = {"trunk.safetensors": DATA, "tokenizer.json": b"{}", "tokenizer_config.json": b"{}"}
        self.manifest: Manifest = write_store(self.path, files=words)
        self.digest = self.manifest.digest
        self.dest = folder / "cache" / self.digest
        self.work = self.dest.with_name(self.digest + ".partial")

    async def fetch(self, *urls: str, **options: Any) -> Store:
        """Fetch it, and check that it is whole."""
        path = await fetch_store(urls, self.dest, options.pop("key", None), self.digest, **options)
        assert path == self.dest and not self.work.exists()
        store = Store.open(path, blocks=False)
        assert store.verify() == [] and store.digest == self.digest
        assert {file.name for file in path.iterdir()} == {"manifest.json", *self.manifest.files}
        return store


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(tmp_path)


# One file


async def pull(folder: Path, fault: Fault | None, moved: list[int] | None = None) -> bytes:
    """Download DATA from a peer with a fault."""
    source = folder / "source"
    source.mkdir(exist_ok=True)
    (source / "f").write_bytes(DATA)
    faults = {"/file/f": fault} if fault else {}
    async with serving_store(source, faults=faults) as peer, ControlClient(peer.url) as client:
        counted = (lambda count: None) if moved is None else moved.append
        await download(client, "/file/f", folder / "f", SPEC, counted)
    assert not (folder / "f.part").exists()
    return (folder / "f").read_bytes()


async def test_download(tmp_path: Path) -> None:
    """A file arrives whole, and every byte was counted."""
    moved: list[int] = []
    assert await pull(tmp_path, None, moved) == DATA
    assert sum(moved) == len(DATA)


@pytest.mark.parametrize("fault", [None, without_range])
@pytest.mark.parametrize("there", [1, 100_000, len(DATA)])
async def test_resumes(tmp_path: Path, there: int, fault: Fault | None) -> None:
    """What an earlier run left is gone on from, or fetched again from a peer without ranges."""
    (tmp_path / "f.part").write_bytes(DATA[:there])
    moved: list[int] = []
    assert await pull(tmp_path, fault, moved) == DATA
    assert sum(moved) == len(DATA) and moved[0] == there


@pytest.mark.parametrize("rest", [b"x" * 10, b"x" * len(DATA), b"x" * (len(DATA) + 1)])
async def test_a_wrong_part_is_not_the_peers_fault(tmp_path: Path, rest: bytes) -> None:
    """A part that was wrong before is thrown away, and the honest peer is not blamed."""
    (tmp_path / "f.part").write_bytes(rest)
    moved: list[int] = []
    assert await pull(tmp_path, None, moved) == DATA
    assert sum(moved) == len(DATA)


@pytest.mark.parametrize("fault", [corrupt, too_long])
async def test_wrong_bytes_name_peer_and_file(tmp_path: Path, fault: Fault) -> None:
    """A peer that sends something else is named with the file; nothing of it is kept."""
    with pytest.raises(StoreCorrupt, match=r"f: .*node http://127\.0\.0\.1:\d+"):
        await pull(tmp_path, fault)
    assert not (tmp_path / "f").exists()
    assert (tmp_path / "f.part").read_bytes() == b""


async def test_another_part_than_asked_is_refused(tmp_path: Path) -> None:
    """An answer that starts elsewhere is not glued on."""
    (tmp_path / "f.part").write_bytes(DATA[:10])
    with pytest.raises(StoreCorrupt, match="another part"):
        await pull(tmp_path, wrong_part)


async def test_a_peer_that_breaks_off(tmp_path: Path) -> None:
    """What came before the break is kept for the next try."""
    with pytest.raises(NodeClosed):
        await pull(tmp_path, cut_after(200_000))
    kept = (tmp_path / "f.part").read_bytes()
    assert kept and DATA.startswith(kept)
    assert await pull(tmp_path, None) == DATA


async def test_a_peer_that_is_too_slow(tmp_path: Path) -> None:
    """A download's deadline follows from its size: a peer that drips is left."""
    (tmp_path / "g").write_bytes(DATA)
    released = asyncio.Event()
    faults = {"/file/g": stall_after(1000, released)}
    async with (
        serving_store(tmp_path, faults=faults) as peer,
        ControlClient(peer.url, total=SOON) as client,
    ):
        with pytest.raises(NodeTimeout):
            await download(client, "/file/g", tmp_path / "f", SPEC, slowest=1e9)
        released.set()


async def test_a_cancelled_download_keeps_its_part(tmp_path: Path) -> None:
    """Ctrl-C leaves a part, and no file."""
    (tmp_path / "g").write_bytes(DATA)
    released = asyncio.Event()
    faults = {"/file/g": stall_after(100_000, released)}
    async with (
        serving_store(tmp_path, faults=faults) as peer,
        ControlClient(peer.url) as client,
    ):
        begun = asyncio.Event()

        def moved(count: int) -> None:
            if count:
                begun.set()

        task = asyncio.create_task(download(client, "/file/g", tmp_path / "f", SPEC, moved))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        released.set()
    assert not (tmp_path / "f").exists()
    assert DATA.startswith((tmp_path / "f.part").read_bytes())


async def test_an_empty_file(tmp_path: Path) -> None:
    """A file of no bytes needs no request."""
    spec = FileSpec(0, hashlib.sha256().hexdigest())
    async with ControlClient(f"127.0.0.1:{unused_port()}") as client:
        await download(client, "/file/f", tmp_path / "f", spec)
    assert (tmp_path / "f").read_bytes() == b""


# A store


async def test_fetch(model: Model) -> None:
    """A driver's copy: manifest, configs, trunk and tokenizer, no blocks; then it is just there."""
    seen: list[tuple[int, int, str]] = []
    async with serving_store(model.path) as peer:
        await model.fetch(peer.url, progress=lambda *step: seen.append(step))
        count = len(peer.asked)
        await model.fetch(peer.url)
        assert len(peer.asked) == count
    total = sum(spec.size for spec in model.manifest.files.values())
    assert seen[-1][:2] == (total, total)
    assert [step[0] for step in seen] == sorted(step[0] for step in seen)


async def test_fetch_with_the_key(model: Model) -> None:
    """With the cluster key every request is let in; without it the sentence says so."""
    async with serving_store(model.path, KEY) as peer:
        with pytest.raises(KeyRefused, match="--key-file"):
            await model.fetch(peer.url)
        assert not model.work.exists()
        await model.fetch(peer.url, key=KEY)


@pytest.mark.parametrize("path", ["/manifest", "/file/config.json", TRUNK, "/file/tokenizer.json"])
@pytest.mark.parametrize("fault", [corrupt, refuse, cut_after(0)])
async def test_the_next_peer_takes_over(model: Model, path: str, fault: Fault) -> None:
    """Whatever the first peer does wrong, the second one's answer is taken."""
    async with (
        serving_store(model.path, faults={path: fault}) as bad,
        serving_store(model.path) as good,
    ):
        await model.fetch(bad.url, good.url)
    assert good.count(path) == 1


async def test_a_dead_peer_is_asked_once(model: Model) -> None:
    """A peer that failed is not tried again for every file."""
    async with (
        serving_store(model.path, faults={"/file/config.json": refuse}) as bad,
        serving_store(model.path) as good,
    ):
        await model.fetch(f"127.0.0.1:{unused_port()}", bad.url, good.url)
    assert [path for path, _ in bad.asked] == ["/manifest", "/file/config.json"]


async def test_a_peer_without_a_trunk_has_the_rest(model: Model, tmp_path: Path) -> None:
    """A 404 sends only that file's request to the next peer."""

    async def missing(request: web.Request, data: bytes) -> web.StreamResponse:
        return web.json_response({"error": "started with --no-trunk"}, status=404)

    async with (
        serving_store(model.path, faults={TRUNK: missing}) as bare,
        serving_store(model.path) as full,
    ):
        with pytest.raises(NodeRefused, match="--no-trunk"):
            await model.fetch(bare.url)
        await model.fetch(bare.url, full.url)
    assert [path for path, _ in full.asked] == [TRUNK]


async def test_a_peer_that_breaks_off_is_asked_for_the_rest(model: Model) -> None:
    """As long as there is progress one peer is enough, each byte fetched once."""
    async with serving_store(model.path, faults={TRUNK: cut_after(len(DATA) // 2)}) as peer:
        await model.fetch(peer.url)
    ranges = [asked for path, asked in peer.asked if path == TRUNK]
    assert ranges[0] is None and len(ranges) in (2, 3)


async def test_a_peer_that_gains_nothing_is_given_up(model: Model) -> None:
    """A peer that breaks off again and again ends the fetch, and what came is kept."""
    async with serving_store(model.path, faults={TRUNK: cut_after(10_000)}) as peer:
        with pytest.raises(NodeClosed):
            await model.fetch(peer.url)
        assert peer.count(TRUNK) <= 3
    assert 0 < (model.work / "trunk.safetensors.part").stat().st_size < len(DATA)
    async with serving_store(model.path) as peer:
        await model.fetch(peer.url)
        asked = dict(peer.asked)
        assert "/manifest" not in asked and "/file/config.json" not in asked
        assert str(asked[TRUNK]).startswith("bytes=")


@pytest.mark.parametrize("path", ["/manifest", TRUNK])
async def test_corruption_is_told_before_anything_else(model: Model, path: str) -> None:
    """When no peer is left the one that sent wrong bytes is named, with the file."""
    async with serving_store(model.path, faults={path: corrupt}) as bad:
        with pytest.raises(StoreCorrupt) as caught:
            await model.fetch(f"127.0.0.1:{unused_port()}", bad.url)
    assert bad.url in str(caught.value)
    assert path.removeprefix("/file/").removeprefix("/") in str(caught.value)
    assert not model.dest.exists()


async def test_no_peer_at_all(model: Model) -> None:
    """Nothing listens: the sentence says so, and nothing is left behind."""
    with pytest.raises(NodeUnreachable):
        await model.fetch(f"127.0.0.1:{unused_port()}")
    assert not model.dest.exists() and not model.work.exists()


async def test_another_models_leftovers_are_dropped(model: Model) -> None:
    """A partial folder of another manifest is not mixed in; nor are strangers of this one."""
    model.work.mkdir(parents=True)
    (model.work / "manifest.json").write_bytes(b"{}")
    (model.work / "config.json").write_bytes(b"{}")
    (model.work / "old").mkdir()
    async with serving_store(model.path) as peer:
        await model.fetch(peer.url)


async def test_leftovers_are_verified(model: Model) -> None:
    """Files of an interrupted fetch are hashed again before they are believed."""
    async with serving_store(model.path) as peer:
        await model.fetch(peer.url)
        os.rename(model.dest, model.work)
        flip(model.work / "trunk.safetensors", 1234)
        (model.work / "stranger").write_bytes(b"x")
        peer.asked.clear()
        await model.fetch(peer.url)
    assert {path for path, _ in peer.asked} == {TRUNK}


async def test_a_damaged_copy_is_repaired(model: Model) -> None:
    """Only what is missing from a damaged store is fetched."""
    async with serving_store(model.path) as peer:
        await model.fetch(peer.url)
        (model.dest / "tokenizer.json").unlink()
        peer.asked.clear()
        await model.fetch(peer.url)
    assert peer.asked == [("/file/tokenizer.json", None)]


async def test_a_taken_place(model: Model) -> None:
    """A folder of something else, or another store, is left as it is."""
    async with serving_store(model.path) as peer:
        model.dest.mkdir(parents=True)
        (model.dest / "letters.txt").write_text("dear")
        with pytest.raises(StoreError, match="not empty"):
            await model.fetch(peer.url)
        assert (model.dest / "letters.txt").read_text() == "dear"
        (model.dest / "letters.txt").unlink()
        await model.fetch(peer.url)


async def test_a_whole_store_is_not_taken_apart(model: Model) -> None:
    """A damaged store with blocks is not turned into a driver's copy."""
    os.renames(model.path, model.dest)
    (model.dest / "trunk.safetensors").write_bytes(b"")
    with pytest.raises(StoreError, match="stands here already"):
        await model.fetch(f"127.0.0.1:{unused_port()}")
    assert (model.dest / "bin").exists()


async def test_a_config_that_asks_for_code(tmp_path: Path) -> None:
    """auto_map ends the fetch before the trunk is moved."""
    model = Model(tmp_path)
    other = tmp_path / "other"
    manifest = write_store(other, config={"model_type": "x", "auto_map": {"AutoModel": "a.B"}})
    model.digest = manifest.digest
    async with serving_store(other) as peer:
        with pytest.raises(ConfigRefused, match="auto_map"):
            await model.fetch(peer.url)
    assert peer.count(TRUNK) == 0 and not model.dest.exists()


async def test_two_at_once(model: Model) -> None:
    """A second fetch into the same place is told to wait."""
    model.work.mkdir(parents=True)
    folder = os.open(model.work, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    with pytest.raises(StoreError, match="another process is fetching"):
        await model.fetch(f"127.0.0.1:{unused_port()}")
    os.close(folder)
    async with serving_store(model.path) as peer:
        await model.fetch(peer.url)


async def test_a_lock_that_was_renamed_away(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waited for a fetch that has just ended finds its store."""
    checks = iter([False, True])
    monkeypatch.setattr(module, "_stands", lambda *args: next(checks))
    assert await fetch_store(["a"], model.dest, None, model.digest) == model.dest
    assert not model.work.exists()


async def test_disk_full_before(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that does not fit is refused before its trunk is moved."""
    usage = SimpleNamespace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    async with serving_store(model.path) as peer:
        with pytest.raises(DiskFull, match=r"300.0 KB is needed and 1.0 KB is free"):
            await model.fetch(peer.url)
    assert peer.count(TRUNK) == 0


async def test_disk_full_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up is DiskFull; with room made, the fetch goes on."""
    model = Model(tmp_path)
    monkeypatch.setattr(module._Fetch, "_check_space", lambda self, names: None)
    with small_disk(tmp_path / "disk", 256 << 10) as disk:
        model.dest = disk / "store"
        model.work = disk / "store.partial"
        async with serving_store(model.path) as peer:
            with pytest.raises(DiskFull):
                await model.fetch(peer.url)
        assert not model.dest.exists()


async def test_errors_are_ours(model: Model) -> None:
    """Every fault on every path ends in one of our errors, and no store."""
    for path in ("/manifest", "/file/config.json", TRUNK):
        for fault in (corrupt, too_long, refuse, cut_after(1)):
            async with serving_store(model.path, faults={path: fault}) as peer:
                with pytest.raises(ExpertNetworkError):
                    await model.fetch(peer.url)
            assert not model.dest.exists()


@pytest.mark.parametrize("digest", ["", "../elsewhere", "/elsewhere", "a" * 63, "A" * 64])
async def test_only_a_digest_names_a_model(tmp_path: Path, digest: str) -> None:
    """What a peer gives for a digest and is none touches nothing on the disk."""
    with pytest.raises(NetworkMismatch, match="is no model digest"):
        await fetch_store(["http://127.0.0.1:9"], tmp_path / "model", None, digest)
    assert not os.listdir(tmp_path)

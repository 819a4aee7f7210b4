"""A store that holds a part of the blocks: what is kept, marked, and said of what is not there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from expert_network import disk
from expert_network.errors import DiskFull, StoreCorrupt, StoreError
from expert_network.store.manifest import MANIFEST
from expert_network.store.marks import SYNCED, WRITTEN
from expert_network.store.reader import Store
from tests.support.small_disk import small_disk
from tests.support.stores import block, flip, write_store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A sparse store without blocks, beside the whole one that it is a part of."""
    write_store(tmp_path / "whole")
    return sparse(tmp_path / "whole", tmp_path / "part")


def sparse(whole: Path, part: Path) -> Store:
    """A store like `whole` with room for blocks."""
    shutil.copytree(whole, part, ignore=shutil.ignore_patterns("bin"), dirs_exist_ok=True)
    Store.open(part, blocks=False).make_room()
    return Store.open(part)


def marks(store: Store, layer: int) -> bytes:
    return (store.path / f"bin/layer_{layer:02d}.have").read_bytes()


def test_a_block_that_is_kept_can_be_read(store: Store) -> None:
    """What was kept reads as in the whole store, by a process that opens it later too."""
    for at in ((0, 2), (1, 0)):
        store.keep(*at, block(*at))
    for opened in (store, Store.open(store.path)):
        assert opened.partial and opened.held(0) == [2] and opened.held(1) == [0]
        assert opened.holds(0, 2) and not opened.holds(0, 1)
        assert opened.read_block(0, 2) == block(0, 2)
        assert opened.verify() == []


def test_a_block_that_is_dropped_takes_no_room(store: Store) -> None:
    """What was dropped is not there any more, on the disk neither; what stays is sound."""
    for expert in range(3):
        store.keep(0, expert, block(0, expert))
    before, pages = disk.sizes(store.path), store.manifest.layer(0).block_bytes // 4096 * 4096
    store.drop(0, [0, 2])
    after = disk.sizes(store.path)
    assert after[0] == before[0] and after[1] <= before[1] - 2 * pages
    opened = Store.open(store.path)
    assert opened.held(0) == [1] and opened.verify() == []
    with pytest.raises(StoreError, match="is not in this store"):
        opened.read_block(0, 2)


def test_what_is_not_there_is_named_and_never_zeros(store: Store) -> None:
    """Reading an absent block names it, verified or not."""
    store.keep(1, 0, block(1, 0))
    for verify in (True, False):
        with pytest.raises(StoreError, match=r"layer_01\.bin: block \(1, 2\) is not in this store"):
            store.read_block(1, 2, verify=verify)
    with pytest.raises(StoreError, match=r"block \(0, 0\) is not in this store"):
        raise store.verify(only={0: [0]})[0]


def test_wrong_bytes_are_not_kept(store: Store) -> None:
    """Another block's bytes, or too few, touch neither the file nor the marks."""
    before = disk.sizes(store.path)
    for data in (block(0, 1), block(0, 2)[:-1], b""):
        with pytest.raises(StoreCorrupt, match=r"block \(0, 2\) at offset 65536 came with bytes"):
            store.keep(0, 2, data)
    assert store.held(0) == [] and disk.sizes(store.path) == before
    with pytest.raises(KeyError):
        store.keep(0, 3, block(0, 2))


def test_only_what_is_kept_takes_room(store: Store) -> None:
    """Layer files look whole and hold what was put in them."""
    spec = store.manifest.layer(0)
    assert (store.path / spec.file).stat().st_size == spec.file_bytes
    _, before = disk.sizes(store.path)
    store.keep(0, 1, block(0, 1))
    assert spec.block_bytes <= disk.sizes(store.path)[1] - before <= spec.stride + 8192


def test_what_is_synced_is_not_looked_at_again(store: Store) -> None:
    """After a crash only blocks that had not reached the disk are hashed; bad ones are dropped."""
    store.keep(0, 0, block(0, 0))
    store.sync()
    for expert in (1, 2):
        store.keep(0, expert, block(0, expert))
    assert marks(store, 0) == bytes([SYNCED, WRITTEN, WRITTEN])
    for expert in (0, 2):
        flip(store.path / "bin/layer_00.bin", expert * 32768 + 5)
    seen: list[int] = []
    assert store.recheck(lambda done, total, what: seen.append(total)) == 1
    assert store.held(0) == [0, 1] and len(seen) == 2
    store.keep(0, 2, block(0, 2))
    store.sync()
    assert marks(store, 0) == bytes([SYNCED] * 3) and store.recheck() == 0


def test_marks_come_before_the_layer(store: Store) -> None:
    """A crash between the two files leaves nothing that is taken for a whole layer."""
    os.unlink(store.path / "bin/layer_01.bin")
    with pytest.raises(StoreCorrupt, match="the file is missing"):
        Store.open(store.path)
    store.make_room()
    assert Store.open(store.path).held(1) == []


def test_marks_that_were_cut_short(store: Store) -> None:
    """A damaged file of marks is named on opening."""
    (store.path / "bin/layer_00.have").write_bytes(b"\1")
    with pytest.raises(StoreCorrupt, match=r"layer_00\.have: it has 1 bytes"):
        Store.open(store.path)


def test_a_part_may_lack_the_trunk(store: Store) -> None:
    """A node's part opens and verifies without a trunk; a whole store does not."""
    store.trunk_path.unlink()
    assert Store.open(store.path).verify() == []
    whole = store.path.with_name("whole")
    (whole / "trunk.safetensors").unlink()
    with pytest.raises(StoreCorrupt, match="the file is missing"):
        Store.open(whole)


def test_a_whole_store_has_everything(store: Store) -> None:
    """Without marks every block is there, room is made already, and keeping mends a block."""
    whole = Store.open(store.path.with_name("whole"))
    before = sorted(file.name for file in whole.path.rglob("*"))
    whole.make_room()
    assert not whole.partial and whole.held(1) == [0, 1, 2]
    flip(whole.path / "bin/layer_00.bin", 3)
    whole.keep(0, 0, block(0, 0))
    whole.sync()
    assert whole.verify() == [] and sorted(f.name for f in whole.path.rglob("*")) == before


def test_a_drivers_copy_holds_nothing(store: Store) -> None:
    """A copy without blocks is no part of the blocks, and says that it holds none."""
    shutil.rmtree(store.path / "bin")
    copy = Store.open(store.path, blocks=False)
    assert copy.held(0) == [] and not copy.partial


def test_a_full_disk_keeps_what_is_there(store: Store, tmp_path: Path) -> None:
    """A block that does not fit is DiskFull and not marked; those before it still read."""
    size = 14 * 4096 + (store.path / MANIFEST).stat().st_size
    with small_disk(tmp_path / "disk", size) as small:
        part = sparse(tmp_path / "whole", small)
        with pytest.raises(DiskFull):
            for expert in range(3):
                part.keep(0, expert, block(0, expert))
        kept = part.held(0)
        assert 0 < len(kept) < 3
        assert all(part.read_block(0, expert) == block(0, expert) for expert in kept)

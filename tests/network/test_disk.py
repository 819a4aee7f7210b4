"""expert_network.disk: files that are whole or not there, and folders that one process holds."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from expert_network import disk
from expert_network.errors import DiskFull, StoreError
from tests.support.small_disk import small_disk


def test_replacing_leaves_nothing_behind(tmp_path: Path) -> None:
    """A file that is broken off leaves the old one, and no other."""
    out = tmp_path / "out"
    out.write_text("old")
    with pytest.raises(ZeroDivisionError), disk.replacing(out) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and out.read_text() == "old"
    with disk.replacing(out) as file:
        file.write(b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and out.read_text() == "new"


def test_one_holder(tmp_path: Path) -> None:
    """A folder is held once, from before it exists until its holder lets go, renamed or not."""
    folder = tmp_path / "deep" / "folder"
    held = disk.lock(folder)
    assert held is not None and disk.lock(folder) is None
    folder.rename(tmp_path / "other")
    assert disk.lock(tmp_path / "other") is None
    assert not disk.is_at(held, folder) and disk.is_at(held, tmp_path / "other")
    anew = disk.lock(folder)
    assert anew is not None
    os.close(held)
    os.close(anew)


def test_a_folder_that_was_renamed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who gets the lock of a folder that has just been renamed takes that of the one there now."""
    folder, flock = tmp_path / "folder", fcntl.flock

    def renaming(descriptor: int, how: int) -> None:
        if not (tmp_path / "old").exists():
            folder.rename(tmp_path / "old")
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", renaming)
    held = disk.lock(folder)
    assert held is not None and disk.is_at(held, folder)
    os.close(held)


def test_what_goes_wrong_is_a_sentence(tmp_path: Path) -> None:
    """A full disk is DiskFull with what is free; anything else keeps the system's reason."""
    reason = r"cannot be written \(Input/output error\)"
    with pytest.raises(StoreError, match=reason), disk.errors(tmp_path / "f"):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    with small_disk(tmp_path / "small", 64 << 10) as small:
        out = small / "f"
        full = pytest.raises(DiskFull, match="the disk is full")
        with full, disk.errors(out), disk.replacing(out) as file:
            file.write(bytes(128 << 10))
        assert list(small.iterdir()) == [] and 0 < disk.free(small / "f") <= 64 << 10


def test_sizes_of_a_sparse_file(tmp_path: Path) -> None:
    """What a sparse file seems to take and what it takes are told apart."""
    with (tmp_path / "f").open("wb") as file:
        file.truncate(10 << 20)
        file.seek(1 << 20)
        file.write(b"x" * 4096)
    apparent, real = disk.sizes(tmp_path)
    assert apparent == 10 << 20 and 4096 <= real <= 64 << 10

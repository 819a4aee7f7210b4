"""Writing a store so that it either stands whole at OUT or not at all.

Beside OUT a working folder OUT.partial, which is locked, holds a note for each finished layer, and
the store as far as it is written. It survives a crash; a later run with the same fingerprint goes
on from it, any other starts over. The manifest comes last, then one rename puts the store at OUT.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from expert_network import disk
from expert_network.errors import DiskFull, StoreError
from expert_network.places import PARTIAL
from expert_network.store.manifest import (
    BLOCKS,
    MANIFEST,
    FileSpec,
    LayerSpec,
    Manifest,
    TensorSpec,
    canonical,
)

# The suffix keeps even a finished store that was not yet renamed from being taken for one.
_STORE = f"store{PARTIAL}"
_FINGERPRINT = "fingerprint"
_COPY = 1 << 20  # bytes
_SHA256 = re.compile(r"[0-9a-f]{64}")


class StoreWriter:
    """One conversion into `out`, a context manager that holds the lock on OUT.partial.

    `fingerprint` names source and options: layers that an earlier run finished are kept if its
    fingerprint was the same. Raises StoreError if `out` is taken or another process writes it,
    DiskFull when there is no room; what is finished by then stays for the next run.
    """

    def __init__(self, out: Path, fingerprint: str) -> None:
        self.out = Path(os.path.abspath(out))
        self._fingerprint = fingerprint
        self._work = self.out.with_name(self.out.name + PARTIAL)
        self._store = self._work / _STORE

    def __enter__(self) -> StoreWriter:
        check_out(self.out)
        with disk.errors(self.out):
            lock = disk.lock(self._work)
        if lock is None:
            advice = "wait until it ends, or choose another place"
            raise StoreError(self.out, "another process is writing this store now", advice)
        self._lock = lock
        try:
            check_out(self.out)  # whoever held the lock just before may have finished it
            with disk.errors(self.out):
                self._resume_or_start_over()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not any(self._work.glob("*.json")):  # no finished layer: nothing to go on from
            shutil.rmtree(self._work, ignore_errors=True)
        os.close(self._lock)

    def reserve(self, needed: int) -> None:
        """Raise DiskFull unless `needed` bytes fit, counting what finished layers hold already."""
        with disk.errors(self.out):
            free = shutil.disk_usage(self._work).free
            files = [file for file in self._store.rglob("*") if file.is_file()]
            there = sum(file.stat().st_blocks * 512 for file in files)
        if needed > free + there:
            raise DiskFull(self.out, needed, free + there)

    def finished(self, spec: LayerSpec) -> LayerSpec | None:
        """`spec` with its sha256 if an earlier run finished this layer, else None.

        A crash may have spared the note and damaged the file: the blocks are hashed again.
        """
        path = self._store / spec.file
        try:
            noted = json.loads(self._note(spec).read_bytes())
            if not _are_digests(noted, spec.experts):
                return None
            known = replace(spec, sha256=tuple(noted))
            with path.open("rb") as file:
                return known if LayerFile(path, file.fileno(), known).is_sound() else None
        except (OSError, ValueError, RecursionError):
            return None

    @contextmanager
    def layer(self, spec: LayerSpec) -> Iterator[LayerFile]:
        """A new sparse file for one layer; removed again if the body raises."""
        path = self._store / f"{spec.file}.tmp"
        with disk.errors(self.out), path.open("w+b") as file:
            (self._store / spec.file).unlink(missing_ok=True)  # a damaged one; its room is needed
            os.ftruncate(file.fileno(), spec.file_bytes)
            try:
                yield LayerFile(path, file.fileno(), spec)
            except BaseException:
                path.unlink(missing_ok=True)
                raise

    def finish_layer(self, file: LayerFile) -> LayerSpec:
        """Hash the blocks as the disk gives them back; from here on the layer survives a crash."""
        os.fsync(file.fd)
        spec = replace(file.spec, sha256=tuple(file.digests()))
        disk.rename(file.path, self._store / spec.file)
        self._put(self._note(spec), [canonical(spec.sha256)])
        return spec

    def add(self, name: str, pieces: Iterable[bytes | memoryview]) -> FileSpec:
        """Write one of the store's other files."""
        return self._put(self._store / name, pieces)

    def add_copy(self, source: Path) -> FileSpec:
        """Copy a file under its own name."""
        with source.open("rb") as file:
            return self.add(source.name, iter(lambda: file.read(_COPY), b""))

    def finish(self, manifest: Manifest) -> Path:
        """Write the manifest and put the store at `out`. Returns `out`."""
        check_out(self.out)
        text = manifest.to_bytes()
        Manifest.from_bytes(text, self.out / MANIFEST)  # no store that could not be opened
        self.add(MANIFEST, [text])
        self._drop_strangers(manifest)
        with disk.errors(self.out):
            disk.rename(self._store, self.out)
        shutil.rmtree(self._work, ignore_errors=True)
        return self.out

    def _resume_or_start_over(self) -> None:
        mark = self._work / _FINGERPRINT
        if not mark.exists() or mark.read_text() != self._fingerprint:
            mark.unlink(missing_ok=True)
            for old in self._work.iterdir():
                if old.is_dir():
                    shutil.rmtree(old)
                else:
                    old.unlink()
            self._put(mark, [self._fingerprint.encode()])
        (self._store / BLOCKS).mkdir(parents=True, exist_ok=True)

    def _drop_strangers(self, manifest: Manifest) -> None:
        """Remove what a killed run left under a temporary name."""
        known = {MANIFEST, *manifest.files, *(spec.file for spec in manifest.layers)}
        for file in list(self._store.rglob("*")):
            if file.is_file() and file.relative_to(self._store).as_posix() not in known:
                file.unlink()

    def _note(self, spec: LayerSpec) -> Path:
        return self._work / f"{Path(spec.file).name}.json"

    def _put(self, path: Path, pieces: Iterable[bytes | memoryview]) -> FileSpec:
        """Write a file whole, or not at all."""
        digest, size = hashlib.sha256(), 0
        with disk.errors(self.out), disk.replacing(path) as file:
            for piece in pieces:
                digest.update(piece)
                size += file.write(piece)
        return FileSpec(size, digest.hexdigest())


class LayerFile:
    """A layer's file while its blocks are filled in, in any order."""

    def __init__(self, path: Path, fd: int, spec: LayerSpec) -> None:
        self.path, self.fd, self.spec = path, fd, spec

    def put(self, expert: int, tensor: TensorSpec, data: memoryview) -> None:
        """Write one tensor of one block. `data` must have the tensor's nbytes."""
        if data.nbytes != tensor.nbytes:
            raise ValueError(f"{tensor.name} has {data.nbytes} bytes, not {tensor.nbytes}")
        disk.write_at(self.fd, data, self.spec.offset(expert) + tensor.offset)

    def digests(self) -> Iterator[str]:
        """The sha256 of each block, read back one at a time."""
        block = memoryview(bytearray(self.spec.block_bytes))
        for expert in range(self.spec.experts):
            done = 0
            while done < len(block):
                count = os.preadv(self.fd, [block[done:]], self.spec.offset(expert) + done)
                if count == 0:
                    raise OSError(errno.EIO, "the file became shorter")
                done += count
            yield hashlib.sha256(block).hexdigest()

    def is_sound(self) -> bool:
        """Whether the file has its size, its blocks their sha256, and nothing stands between."""
        if os.fstat(self.fd).st_size != self.spec.file_bytes:
            return False
        gap = self.spec.stride - self.spec.block_bytes
        ends = (self.spec.offset(e) + self.spec.block_bytes for e in range(self.spec.experts))
        if any(any(os.pread(self.fd, gap, end)) for end in ends):
            return False
        return tuple(self.digests()) == self.spec.sha256


def check_out(out: Path) -> None:
    """Raise StoreError unless a store can be put at `out`: nothing there, or an empty folder."""
    advice = "choose another place, or remove it first"
    if (out / MANIFEST).exists():
        raise StoreError(out, "a store stands here already", advice)
    if out.is_symlink():  # a rename cannot put a folder in its place
        raise StoreError(out, "this is a symbolic link", "name the folder itself, or another place")
    if out.is_dir() and any(out.iterdir()):
        raise StoreError(out, "this folder is not empty", advice)
    if out.is_dir() and out.samefile(os.curdir):  # a rename would leave the shell in no folder
        raise StoreError(out, "this is the current directory", "name a folder inside it")
    if not out.is_dir() and os.path.lexists(out):
        raise StoreError(out, "this is a file", advice)


def _are_digests(value: object, count: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) == count
        and all(isinstance(item, str) and _SHA256.fullmatch(item) for item in value)
    )

"""Downloading one file from one peer: resumed where it broke off, and checked as it arrives."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from expert_network import disk
from expert_network.errors import NodeClosed, StoreCorrupt
from expert_network.net.blocks import LEAVE_OUT, SLOWEST, start_of
from expert_network.net.control import PIECE, ControlClient
from expert_network.store.manifest import FileSpec


async def download(
    client: ControlClient,
    path: str,
    dest: Path,
    spec: FileSpec,
    moved: Callable[[int], None] = lambda count: None,
    slowest: float = SLOWEST,
) -> None:
    """Fetch `path` into the file `dest`, going on from DEST.part if that is there.

    moved: told of bytes gained, and of bytes lost by starting over, as a negative count.
    slowest: bytes a second that the peer must keep up, beside the client's own deadlines. Raises
    StoreCorrupt, naming peer and file, if what came is not what `spec` says; what ControlClient
    raises, after which DEST.part stays for another try; DiskFull or StoreError.
    """
    part = dest.with_name(f"{dest.name}.part")
    with _appending(dest, part) as sink:
        resumed = await asyncio.to_thread(sink.resume, spec.size)
        moved(resumed)
        await _pull(client, path, sink, spec, moved, slowest)
        if resumed and sink.sha256 != spec.sha256:
            # The part may be another peer's fault: only what this one sent can be held against it.
            moved(-sink.start_over())
            await _pull(client, path, sink, spec, moved, slowest)
        if sink.size != spec.size or sink.sha256 != spec.sha256:
            moved(-sink.start_over())
            problem = f"what node {client.url} sent does not match the manifest's sha256"
            raise StoreCorrupt(dest, problem, LEAVE_OUT)
        await asyncio.to_thread(sink.sync)
    with disk.errors(dest):
        disk.rename(part, dest)


class _Sink:
    """A file that grows, and its sha256. All bytes in it have been hashed."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
        self._hash = hashlib.sha256()
        self.size = 0

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def resume(self, most: int) -> int:
        """Take over what the file holds already; how many bytes that are."""
        with disk.errors(self._path):
            self._file.seek(0)
            while data := self._file.read(PIECE):
                self._hash.update(data)
                self.size += len(data)
        if self.size > most:
            self.start_over()
        return self.size

    def start_over(self) -> int:
        """Forget all of it; how many bytes that were."""
        lost, self.size = self.size, 0
        self._hash = hashlib.sha256()
        with disk.errors(self._path):
            self._file.truncate(0)
            self._file.seek(0)
        return lost

    def write(self, data: bytes) -> None:
        with disk.errors(self._path):
            self._file.write(data)
        self._hash.update(data)
        self.size += len(data)

    def sync(self) -> None:
        with disk.errors(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())


@contextmanager
def _appending(dest: Path, part: Path) -> Iterator[_Sink]:
    with disk.errors(dest):
        file = os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b")
    try:
        yield _Sink(file, dest)
    finally:
        with disk.errors(dest):
            file.close()


async def _pull(
    client: ControlClient,
    path: str,
    sink: _Sink,
    spec: FileSpec,
    moved: Callable[[int], None],
    slowest: float,
) -> None:
    """Append what is missing of `spec.size` bytes."""
    if sink.size == spec.size:
        return
    headers = {}
    if sink.size:
        headers = {"Range": f"bytes={sink.size}-", "If-Range": f'"{spec.sha256}"'}
    deadline = client.total + spec.size / slowest
    async with client.get(path, headers, (200, 206), deadline) as response:
        if start_of(response) != sink.size:
            moved(-sink.start_over())
        if start_of(response) != sink.size:
            raise StoreCorrupt(path, f"node {client.url} sent another part of it", LEAVE_OUT)
        async for piece in response.content.iter_chunked(PIECE):
            if sink.size + len(piece) > spec.size:
                moved(-sink.start_over())
                problem = f"node {client.url} sent more than the {spec.size} bytes of it"
                raise StoreCorrupt(path, problem, LEAVE_OUT)
            await asyncio.to_thread(sink.write, piece)
            moved(len(piece))
    if sink.size < spec.size:
        problem = f"sent {sink.size} of the {spec.size} bytes of {path}"
        raise NodeClosed(client.url, problem, "check that it still runs, and its log")

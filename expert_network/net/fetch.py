"""Fetching a store from peers: every byte is checked against the manifest, and it against a digest.

What is fetched lands in DEST.partial under temporary names and is renamed when it is whole, so
that a killed fetch leaves nothing that looks like a store, and the next one goes on from there.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from expert_network import disk
from expert_network.errors import (
    DiskFull,
    ExpertNetworkError,
    KeyRefused,
    NetworkMismatch,
    NodeClosed,
    NodeError,
    NodeRefused,
    NodeTimeout,
    StoreCorrupt,
    StoreError,
)
from expert_network.net.auth import ClusterKey
from expert_network.net.blocks import LEAVE_OUT
from expert_network.net.control import SILENCE, TOTAL, ControlClient
from expert_network.net.download import download
from expert_network.places import PARTIAL
from expert_network.progress import Progress, silent
from expert_network.store.manifest import (
    BLOCKS,
    CONFIG,
    MANIFEST,
    MAX_MANIFEST,
    TRUNK,
    FileSpec,
    Manifest,
    is_digest,
)
from expert_network.store.reader import Store, read_config
from expert_network.store.writer import check_out

__all__ = ["ControlClient", "download", "fetch_store"]

#: How often a peer that broke off in a file is asked for the rest of it.
ATTEMPTS = 3

_FETCHING = "fetching the trunk and the tokenizer"
_FETCHING_FILES, _FETCHING_TRUNK = "fetching the tokenizer", "fetching the trunk"
T = TypeVar("T")


async def fetch_store(
    urls: Sequence[str],
    dest: Path,
    key: ClusterKey | None,
    digest: str,
    progress: Progress = silent,
    *,
    part: bool = False,
    total: float = TOTAL,
    silence: float = SILENCE,
) -> Path:
    """A store without blocks at `dest`: manifest, configs, trunk and tokenizer. Returns `dest`.

    part: what a node begins with: no trunk yet, and room for blocks of which none is there.

    digest: the model digest that all nodes agree on; nothing else decides what is right. A store
    that stands there already is taken as it is, or repaired. The peers are asked in their order,
    the next one when one fails. Raises StoreCorrupt if peers sent something else, else what the
    first of them failed with; ConfigRefused; DiskFull; StoreError if `dest` is taken.
    """
    if not is_digest(digest):
        raise NetworkMismatch(f"{digest[:80]!r} is no model digest; see what the nodes are.")
    if _stands(dest, digest, part):
        return dest
    work = dest.with_name(dest.name + PARTIAL)
    with _locked(work, dest):
        if _stands(dest, digest, part):  # whoever held the lock just before has fetched it
            return dest
        _take_over(dest, work, digest)
        async with AsyncExitStack() as stack:
            clients = [ControlClient(url, key, total=total, silence=silence) for url in urls]
            peers = _Peers([await stack.enter_async_context(client) for client in clients])
            without, what = ((TRUNK,), _FETCHING_FILES) if part else ((), _FETCHING)
            await _Fetch(peers, work, digest, progress, what, without).run()
        if part:
            Store.open_unchecked(work, blocks=False).make_room()
        Store.open(work, blocks=part)
        with disk.errors(dest):
            disk.rename(work, dest)
    return dest


async def fetch_trunk(
    store: Store, urls: Sequence[str], key: ClusterKey | None, progress: Progress = silent
) -> None:
    """The trunk of `store`, if it lacks it, from the first peer that has one. See fetch_store."""
    if store.trunk_path.exists():
        return
    async with AsyncExitStack() as stack:
        clients = [ControlClient(url, key) for url in urls]
        peers = _Peers([await stack.enter_async_context(client) for client in clients])
        others = [name for name in store.manifest.files if name != TRUNK]
        fetch = _Fetch(peers, store.path, store.digest, progress, _FETCHING_TRUNK, others)
        await fetch.run()


class _Peers:
    """Who may still be asked, in order."""

    def __init__(self, clients: Iterable[ControlClient]) -> None:
        self._clients = list(clients)

    async def first(self, ask: Callable[[ControlClient], Awaitable[T]]) -> T:
        """The answer of the first peer that has one; those that failed are not asked again.

        Raises StoreCorrupt if a peer sent something wrong, else what the first failed with.
        """
        errors: list[ExpertNetworkError] = []
        for client in list(self._clients):
            try:
                return await ask(client)
            except (NodeError, KeyRefused, StoreCorrupt) as error:
                errors.append(error)
                # Without this file a peer may still have the next one.
                if not (isinstance(error, NodeRefused) and error.code == 404):
                    self._clients.remove(client)
        corrupt = [error for error in errors if isinstance(error, StoreCorrupt)]
        raise (corrupt or errors)[0]


class _Fetch:
    """One fetch into `work`, a folder that is locked, of all files but `without`."""

    def __init__(
        self,
        peers: _Peers,
        work: Path,
        digest: str,
        progress: Progress,
        what: str,
        without: Collection[str],
    ) -> None:
        self._peers, self._work, self._digest = peers, work, digest
        self._progress, self._what, self._without = progress, what, without
        self._done = self._total = 0

    async def run(self) -> None:
        manifest = await self._manifest()
        files = {n: spec for n, spec in manifest.files.items() if n not in self._without}
        self._total = sum(spec.size for spec in files.values())
        self._check_space(files)
        # The configs first: one that asks to run code ends it before a large file is moved.
        for name in sorted(files, key=lambda name: (not name.endswith(CONFIG), name)):
            await self._file(name, files[name])
            if name.endswith(CONFIG):
                read_config(self._work / name)
        self._drop_strangers(manifest)

    async def _manifest(self) -> Manifest:
        path = self._work / MANIFEST
        if path.exists():  # checked by _take_over
            return Manifest.from_bytes(path.read_bytes(), path)
        data = await self._peers.first(self._manifest_of)
        manifest = Manifest.from_bytes(data, self._work / MANIFEST)
        with disk.errors(path), disk.replacing(path) as file:
            file.write(data)
        return manifest

    async def _manifest_of(self, client: ControlClient) -> bytes:
        data = await client.get_bytes("/manifest", MAX_MANIFEST)
        if hashlib.sha256(data).hexdigest() != self._digest:
            problem = f"what node {client.url} sent is not the manifest {self._digest[:12]}"
            raise StoreCorrupt(self._work / MANIFEST, problem, LEAVE_OUT)
        return data

    def _check_space(self, names: Collection[str]) -> None:
        with disk.errors(self._work):
            parts = [self._work / name for name in (*names, *(f"{name}.part" for name in names))]
            there = sum(file.stat().st_size for file in parts if file.exists())
            free = shutil.disk_usage(self._work).free
        if self._total > there + free:
            raise DiskFull(self._work, self._total, there + free)

    async def _file(self, name: str, spec: FileSpec) -> None:
        path = self._work / name
        if path.exists():
            if await asyncio.to_thread(_matches, path, spec):
                self._moved(spec.size)
                return
            # To be gone on from, or found wanting and started over.
            os.replace(path, path.with_name(f"{name}.part"))

        await self._peers.first(lambda client: self._download(client, path, spec))

    async def _download(self, client: ControlClient, path: Path, spec: FileSpec) -> None:
        """From one peer; one that breaks off is asked for the rest as long as there is progress."""
        start = self._done
        for attempt in range(ATTEMPTS):
            before = self._done
            try:
                return await download(client, f"/file/{path.name}", path, spec, self._moved)
            except ExpertNetworkError as error:
                gained, lasting = self._done > before, isinstance(error, (NodeClosed, NodeTimeout))
                # What is kept counts again when it is gone on from.
                self._moved(start - self._done)
                if not (gained and lasting) or attempt == ATTEMPTS - 1:
                    raise

    def _moved(self, count: int) -> None:
        self._done += count
        self._progress(self._done, self._total, self._what)

    def _drop_strangers(self, manifest: Manifest) -> None:
        for file in self._work.iterdir():
            if file.name not in (MANIFEST, BLOCKS, *manifest.files):
                file.unlink()


def _matches(path: Path, spec: FileSpec) -> bool:
    with disk.errors(path), path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell() == spec.size and found == spec.sha256


def _stands(dest: Path, digest: str, part: bool) -> bool:
    """Whether that store, without its blocks or with a part of them, is at `dest` and opens."""
    try:
        return Store.open(dest, blocks=part).digest == digest
    except StoreError:
        return False


def _take_over(dest: Path, work: Path, digest: str) -> None:
    """Keep in `work` what belongs to this model, from an earlier fetch or a damaged store."""
    with disk.errors(dest):
        blocks = (dest / BLOCKS).exists()  # a whole store is more than we could put back
        if _digest_of(dest) == digest and not blocks and not any(work.iterdir()):
            for file in dest.iterdir():
                os.replace(file, work / file.name)
            dest.rmdir()
        if _digest_of(work) != digest:
            for file in work.iterdir():
                shutil.rmtree(file) if file.is_dir() else file.unlink()
    check_out(dest)


def _digest_of(folder: Path) -> str | None:
    try:
        with (folder / MANIFEST).open("rb") as file:
            return hashlib.sha256(file.read(MAX_MANIFEST + 1)).hexdigest()
    except OSError:
        return None


@contextmanager
def _locked(work: Path, dest: Path) -> Iterator[None]:
    """Hold `work`, made if need be, against other processes. It may be renamed meanwhile."""
    with disk.errors(dest):
        folder = disk.lock(work)
    if folder is None:
        advice = "wait until it ends, or choose another place"
        raise StoreError(dest, "another process is fetching this store now", advice)
    try:
        yield
    finally:
        if disk.is_at(folder, work):
            with suppress(OSError):  # there is something to go on from
                work.rmdir()
        os.close(folder)

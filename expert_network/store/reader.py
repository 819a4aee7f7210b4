"""A store that stands: open it, read a block, keep one more, verify all of it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from expert_network import disk
from expert_network.errors import ConfigRefused, StoreCorrupt, StoreError
from expert_network.model.config import code_entry, too_deep
from expert_network.progress import Progress, silent
from expert_network.store.manifest import (
    BLOCKS,
    CONFIG,
    MANIFEST,
    MAX_MANIFEST,
    TRUNK,
    LayerSpec,
    Manifest,
)
from expert_network.store.marks import ABSENT, WRITTEN, Marks

MAX_CONFIG = 16 << 20  # bytes; a per-layer quantization map of 94 layers takes 100 KB
CHUNK = 4 << 20  # bytes read at once when a whole file is hashed
MAX_READ = 1 << 30  # bytes in one call: macOS refuses 2 GiB and more
VERIFYING = "verifying"

_REPAIR = "convert the checkpoint again or fetch the store from a peer"


class Store:
    """An opened store. Holds no file open: any thread may read blocks, and keep them.

    A store may hold a part of the blocks, and no trunk then: `partial`.
    """

    def __init__(
        self, path: Path, manifest: Manifest, config: dict[str, Any], has_blocks: bool
    ) -> None:
        self.path, self.manifest, self.config, self.has_blocks = path, manifest, config, has_blocks

    @classmethod
    def open(cls, path: Path | str, blocks: bool = True) -> Store:
        """Open the store at `path` and check that every file is there, of the right size.

        With `blocks=False` the layer files may be absent: a driver needs trunk and tokenizer only.
        Where they hold a part of the blocks, the trunk may be absent: a node can do without it.
        Raises StoreError if it is not a store of this version, StoreCorrupt if a file is missing,
        cut short or (a config) changed, ConfigRefused if a config asks to run code.
        """
        store = cls.open_unchecked(path, blocks)
        for problem in store._size_problems().values():
            raise problem
        store.config = store._read_configs()
        return store

    @classmethod
    def open_unchecked(cls, path: Path | str, blocks: bool = True) -> Store:
        """Open a store of which only the manifest is known to be sound, to `verify` the rest."""
        path = Path(path)
        manifest = Manifest.from_bytes(_manifest_bytes(path), path / MANIFEST)
        return cls(path, manifest, {}, blocks)

    @property
    def digest(self) -> str:
        """The model digest."""
        return self.manifest.digest

    @property
    def trunk_path(self) -> Path:
        """The trunk's safetensors file."""
        return self.path / TRUNK

    @property
    def has_tokenizer(self) -> bool:
        """Whether text can be turned into ids: some vocabulary came with the checkpoint."""
        return any(is_vocabulary(name) for name in self.manifest.files)

    @property
    def partial(self) -> bool:
        """Whether layer files may lack blocks."""
        return self.has_blocks and any(
            (self.path / spec.marks).exists() for spec in self.manifest.layers
        )

    def held(self, layer: int) -> list[int]:
        """The experts of a layer whose blocks are here, ascending. Raises KeyError."""
        spec = self.manifest.layer(layer)
        marks = self._marks(spec)
        if not self.has_blocks:
            return []
        return [e for e in range(spec.experts) if marks is None or marks[e] != ABSENT]

    def holds(self, layer: int, expert: int) -> bool:
        """Whether one block is here. Raises KeyError for a layer without experts."""
        return expert in self.held(layer)

    def read_block(
        self, layer: int, expert: int, out: memoryview | None = None, verify: bool = True
    ) -> memoryview:
        """The bytes of one block, into `out` (at least block_bytes, writable) if given.

        Raises KeyError for a block the model does not have, StoreCorrupt if the bytes are not
        those of the manifest (`verify=False` leaves out the sha256), StoreError if reading fails.
        """
        spec = self.manifest.layer(layer)
        view = memoryview(bytearray(spec.block_bytes)) if out is None else out.cast("B")
        view = view[: spec.block_bytes]
        self.read_block_into(layer, expert, [view], verify)
        return view

    def read_block_into(
        self, layer: int, expert: int, pieces: Sequence[memoryview], verify: bool = True
    ) -> None:
        """Scatter one block over writable views of bytes, which are block_bytes long in all.

        Raises what read_block raises.
        """
        spec = self._spec(layer, expert)
        marks = self._marks(spec)
        if marks is not None and marks[expert] == ABSENT:
            raise not_held(self.path / spec.file, layer, expert)
        file, offset, digest = self.path / spec.file, spec.offset(expert), hashlib.sha256()
        with _opened(file) as fd:
            for piece in pieces:
                if _read_at(fd, file, piece, offset) < len(piece):
                    raise _bad_block(self.path, spec, expert, "is cut short")
                offset += len(piece)
                if verify:
                    digest.update(piece)
        if verify and digest.hexdigest() != spec.sha256[expert]:
            raise _bad_block(self.path, spec, expert, "does not match its sha256")

    def make_room(self) -> None:
        """Have a layer file, sparse and without blocks, where there is none. Raises StoreError."""
        for spec in self.manifest.layers:
            with disk.errors(self.path / spec.file):
                Marks(self.path, spec).lay_out()
        self.has_blocks = True

    def keep(self, layer: int, expert: int, data: memoryview | bytes | bytearray) -> None:
        """Verify one block's bytes and put them in their place, to be read from now on.

        They outlive this process, and a power cut once `sync` has been called. Raises KeyError,
        StoreCorrupt for other bytes than the manifest's, DiskFull or StoreError.
        """
        spec = self._spec(layer, expert)
        file = self.path / spec.file
        if len(data) != spec.block_bytes or hashlib.sha256(data).hexdigest() != spec.sha256[expert]:
            raise _bad_block(self.path, spec, expert, "came with bytes that are not its own")
        with disk.errors(file):
            fd = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
            try:
                disk.write_at(fd, data, spec.offset(expert))
            finally:
                os.close(fd)
            if self._marks(spec) is not None:
                Marks(self.path, spec).mark([expert], WRITTEN)

    def drop(self, layer: int, experts: Sequence[int]) -> None:
        """Give the disk back what it holds of blocks, which are not here from now on.

        For a store that holds a part of the blocks. Raises StoreError.
        """
        spec = self.manifest.layer(layer)
        with disk.errors(self.path / spec.file):
            Marks(self.path, spec).mark(list(experts), ABSENT)
            fd = os.open(self.path / spec.file, os.O_WRONLY | os.O_CLOEXEC)
            try:
                for expert in experts:
                    disk.punch(fd, spec.offset(expert), spec.stride)
            finally:
                os.close(fd)

    def sync(self) -> None:
        """Have all blocks that were kept on the disk. Raises DiskFull or StoreError."""
        for spec in self.manifest.layers:
            with disk.errors(self.path / spec.file):
                Marks(self.path, spec).sync()

    def recheck(self, progress: Progress = silent) -> int:
        """Drop the blocks that a power cut has damaged, of those not yet synced; how many."""
        unsure = [
            (spec, expert)
            for spec in self.manifest.layers
            for expert, mark in enumerate(self._marks(spec) or b"")
            if mark == WRITTEN
        ]
        total, done, dropped = sum(spec.block_bytes for spec, _ in unsure), 0, 0
        for spec, expert in unsure:
            try:
                self.read_block(spec.layer, expert)
            except StoreCorrupt:
                with disk.errors(self.path / spec.file):
                    Marks(self.path, spec).mark([expert], ABSENT)
                dropped += 1
            done += spec.block_bytes
            progress(done, total, VERIFYING)
        return dropped

    def check_file(self, name: str) -> None:
        """Hash one of the manifest's files. Raises StoreCorrupt if it is not what it was."""
        for _ in self._hash_file(name):
            pass

    def verify(
        self,
        progress: Progress = silent,
        only: Mapping[int, Collection[int]] | None = None,
    ) -> list[StoreError]:
        """Hash every file and block and return what is wrong, an empty list for a sound store.

        `only` limits the blocks to these experts by layer, for a node that keeps its part.
        """
        broken = self._size_problems()
        problems: list[StoreError] = list(broken.values())
        # In a layer file of the wrong size the blocks are hashed all the same, to name the bad.
        known = {n for n in broken if n in self.manifest.files or not (self.path / n).exists()}
        steps = self._verification(only)
        total, done = sum(size for _, size, _ in steps), 0
        for name, size, step in steps:
            if name not in known:
                problems += _problems(step, done, total, progress)
            done += size
        progress(total, total, VERIFYING)
        return problems

    def _verification(
        self, only: Mapping[int, Collection[int]] | None
    ) -> list[tuple[str, int, Iterator[int]]]:
        """What to hash: (file, bytes, a generator that hashes it piece by piece)."""
        files = {n: spec for n, spec in self.manifest.files.items() if not self._may_lack(n)}
        steps = [(name, spec.size, self._hash_file(name)) for name, spec in files.items()]
        for spec in self.manifest.layers if self.has_blocks else ():
            experts = self.held(spec.layer) if only is None else sorted(only.get(spec.layer, ()))
            steps += [(spec.file, spec.stride, self._hash_block(spec, e)) for e in experts]
        return steps

    def _hash_file(self, name: str) -> Iterator[int]:
        file, spec, digest = self.path / name, self.manifest.files[name], hashlib.sha256()
        buffer = memoryview(bytearray(CHUNK))
        with _opened(file) as fd:
            offset = 0
            while count := _read_at(fd, file, buffer, offset):
                digest.update(buffer[:count])
                offset += count
                yield count
        if offset != spec.size or digest.hexdigest() != spec.sha256:
            raise StoreCorrupt(file, "the file does not match its sha256", _REPAIR)

    def _hash_block(self, spec: LayerSpec, expert: int) -> Iterator[int]:
        self.read_block(spec.layer, expert)
        yield spec.block_bytes
        padding = spec.stride - spec.block_bytes
        file, offset = self.path / spec.file, spec.offset(expert) + spec.block_bytes
        rest = memoryview(bytearray(padding))
        with _opened(file) as fd:
            _read_at(fd, file, rest, offset)
        if any(rest):
            raise _bad_block(self.path, spec, expert, "is followed by bytes that are not zero")
        yield padding

    def _size_problems(self) -> dict[str, StoreError]:
        """What is missing or has another size than it should, by name."""
        files = self.manifest.files.items()
        expected = {name: spec.size for name, spec in files if not self._may_lack(name)}
        if self.has_blocks:
            expected |= {spec.file: spec.file_bytes for spec in self.manifest.layers}
            parts = [spec for spec in self.manifest.layers if (self.path / spec.marks).exists()]
            expected |= {spec.marks: spec.experts for spec in parts}
        problems = {name: _size_problem(self.path / name, size) for name, size in expected.items()}
        return {name: problem for name, problem in problems.items() if problem is not None}

    def _may_lack(self, name: str) -> bool:
        return name == TRUNK and self.partial and not self.trunk_path.exists()

    def _spec(self, layer: int, expert: int) -> LayerSpec:
        spec = self.manifest.layer(layer)
        if not 0 <= expert < spec.experts:
            raise KeyError((layer, expert))
        return spec

    def _marks(self, spec: LayerSpec) -> bytes | None:
        """The marks of a layer that may lack blocks, one for each expert."""
        try:
            marks = Marks(self.path, spec).read()
        except OSError as error:
            raise _unreadable(self.path / spec.marks, error) from error
        # Cut short it vouches for nothing beyond its end.
        return None if marks is None else marks.ljust(spec.experts, bytes([ABSENT]))

    def _read_configs(self) -> dict[str, Any]:
        """The config; the tokenizer's and the others are checked with it, each may name code."""
        names = [name for name in self.manifest.files if name.endswith(CONFIG)]
        return {name: self._read_config(name) for name in names}[CONFIG]

    def _read_config(self, name: str) -> dict[str, Any]:
        if self.manifest.files[name].size > MAX_CONFIG:
            problem = f"the config is larger than {MAX_CONFIG} bytes"
            raise StoreError(self.path / name, problem, _REPAIR)
        self.check_file(name)
        return read_config(self.path / name)


def read_config(file: Path) -> dict[str, Any]:
    """A JSON config that asks to run no code. Raises StoreError or ConfigRefused."""
    try:
        config = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise StoreError(file, f"it is not JSON ({error})", _REPAIR) from error
    if not isinstance(config, dict) or too_deep(config):
        raise StoreError(file, "it is not a JSON object of a sane depth", _REPAIR)
    if entry := code_entry(config):
        raise ConfigRefused(file, entry)
    return config


def is_vocabulary(name: str) -> bool:
    """Whether a file of this name can hold a tokenizer's vocabulary."""
    return name in ("tokenizer.json", "vocab.json", "vocab.txt") or name.endswith(
        (".model", ".tiktoken")
    )


def _problems(
    step: Iterator[int], done: int, total: int, progress: Progress
) -> Iterator[StoreError]:
    """Run one step of a verification that stands at `done`; what it finds, if anything."""
    try:
        for count in step:
            done += count
            progress(done, total, VERIFYING)
    except StoreError as problem:
        yield problem


def _size_problem(file: Path, size: int) -> StoreError | None:
    try:
        found = file.stat().st_size
    except FileNotFoundError:
        return StoreCorrupt(file, "the file is missing", _REPAIR)
    except OSError as error:
        return _unreadable(file, error)
    if found == size:
        return None
    return StoreCorrupt(file, f"it has {found} bytes where the manifest says {size}", _REPAIR)


def _manifest_bytes(path: Path) -> bytes:
    try:
        with (path / MANIFEST).open("rb") as file:
            return file.read(MAX_MANIFEST + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise _not_a_store(path) from None
    except OSError as error:
        raise _unreadable(path / MANIFEST, error) from error


def _not_a_store(path: Path) -> StoreError:
    if not path.exists():
        advice = "see `expert-net models` for what can be downloaded, or check the path"
        return StoreError(path, "there is no such store", advice)
    if (path / CONFIG).exists():
        advice = f"convert it first: expert-net preprocess {path} OUT"
        return StoreError(path, "this is a checkpoint, not a store", advice)
    advice = f"a store holds {MANIFEST}, {TRUNK} and {BLOCKS}/"
    return StoreError(path, f"this is not a store, it has no {MANIFEST}", advice)


class _opened:
    """A file descriptor for reading, with OSErrors made sentences."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> int:
        try:
            self._fd = os.open(self._path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except FileNotFoundError:
            raise StoreCorrupt(self._path, "the file is missing", _REPAIR) from None
        except OSError as error:
            raise _unreadable(self._path, error) from error
        return self._fd

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _read_at(fd: int, path: Path, view: memoryview, offset: int) -> int:
    """Fill `view` from `offset` on; the count is smaller only where the file ends."""
    done = 0
    while done < len(view):
        try:
            count = os.preadv(fd, [view[done : done + MAX_READ]], offset + done)
        except OSError as error:
            raise _unreadable(path, error) from error
        if count == 0:
            break
        done += count
    return done


def not_held(where: Path, layer: int, expert: int) -> StoreError:
    """The error for a block that a store lacks."""
    problem = f"block ({layer}, {expert}) is not in this store, which holds a part of the blocks"
    advice = "start expert-node with --peers, which fetches what it owns, or give a whole store"
    return StoreError(where, problem, advice)


def _bad_block(store: Path, spec: LayerSpec, expert: int, problem: str) -> StoreCorrupt:
    where = f"block ({spec.layer}, {expert}) at offset {spec.offset(expert)}"
    return StoreCorrupt(store / spec.file, f"{where} {problem}", _REPAIR)


def _unreadable(path: Path, error: OSError) -> StoreError:
    reason = error.strerror or str(error)
    return StoreError(path, f"it cannot be read ({reason})", "check the disk and the permissions")

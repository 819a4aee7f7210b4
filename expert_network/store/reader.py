"""Reading a store: open it, read a block, verify all of it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from expert_network.errors import ConfigRefused, StoreCorrupt, StoreError
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

REFUSED_ENTRIES = ("auto_map", "model_file")  # of a config: each would run code of its own
MAX_CONFIG = 16 << 20  # bytes; a per-layer quantization map of 94 layers takes 100 KB
CHUNK = 4 << 20  # bytes read at once when a whole file is hashed
MAX_READ = 1 << 30  # bytes in one call: macOS refuses 2 GiB and more

_REPAIR = "convert the checkpoint again or fetch the store from a peer"


class Store:
    """An opened store. Holds no file open: any thread may read blocks."""

    def __init__(
        self, path: Path, manifest: Manifest, config: dict[str, Any], has_blocks: bool
    ) -> None:
        self.path, self.manifest, self.config, self.has_blocks = path, manifest, config, has_blocks

    @classmethod
    def open(cls, path: Path | str, blocks: bool = True) -> Store:
        """Open the store at `path` and check that every file is there, of the right size.

        With `blocks=False` the layer files may be absent: a driver needs trunk and tokenizer only.
        Raises StoreError if it is not a store of this version, StoreCorrupt if a file is missing,
        cut short or (a config) changed, ConfigRefused if a config asks to run code.
        """
        path = Path(path)
        manifest = Manifest.from_bytes(_manifest_bytes(path), path / MANIFEST)
        store = cls(path, manifest, {}, blocks)
        store._check_sizes()
        store.config = store._read_configs()
        return store

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

    def read_block(
        self, layer: int, expert: int, out: memoryview | None = None, verify: bool = True
    ) -> memoryview:
        """The bytes of one block, into `out` (at least block_bytes, writable) if given.

        Raises KeyError for a block the model does not have, StoreCorrupt if the bytes are not
        those of the manifest (`verify=False` leaves out the sha256), StoreError if reading fails.
        """
        spec = self.manifest.layer(layer)
        if not 0 <= expert < spec.experts:
            raise KeyError((layer, expert))
        view = memoryview(bytearray(spec.block_bytes)) if out is None else out.cast("B")
        view = view[: spec.block_bytes]
        file = self.path / spec.file
        with _opened(file) as fd:
            if _read_at(fd, file, view, spec.offset(expert)) < spec.block_bytes:
                raise _bad_block(self.path, spec, expert, "is cut short")
        if verify and hashlib.sha256(view).hexdigest() != spec.sha256[expert]:
            raise _bad_block(self.path, spec, expert, "does not match its sha256")
        return view

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
        problems: list[StoreError] = []
        steps = self._verification(only)
        total, done = sum(size for _, size, _ in steps), 0
        for what, size, step in steps:
            try:
                hashed = done
                for count in step:
                    hashed += count
                    progress(hashed, total, what)
            except StoreError as problem:
                problems.append(problem)
            done += size
        progress(total, total, "verified")
        return problems

    def _verification(
        self, only: Mapping[int, Collection[int]] | None
    ) -> list[tuple[str, int, Iterator[int]]]:
        """What to hash: (file, bytes, a generator that hashes it piece by piece)."""
        files = self.manifest.files.items()
        steps = [(name, spec.size, self._hash_file(name)) for name, spec in files]
        for spec in self.manifest.layers if self.has_blocks else ():
            experts = range(spec.experts) if only is None else sorted(only.get(spec.layer, ()))
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

    def _check_sizes(self) -> None:
        expected = {name: spec.size for name, spec in self.manifest.files.items()}
        if self.has_blocks:
            expected |= {spec.file: spec.file_bytes for spec in self.manifest.layers}
        for name, size in expected.items():
            try:
                found = (self.path / name).stat().st_size
            except FileNotFoundError:
                raise StoreCorrupt(self.path / name, "the file is missing", _REPAIR) from None
            except OSError as error:
                raise _unreadable(self.path / name, error) from error
            if found != size:
                problem = f"the file has {found} bytes where the manifest says {size}"
                raise StoreCorrupt(self.path / name, problem, _REPAIR)

    def _read_configs(self) -> dict[str, Any]:
        """The config; the tokenizer's and the others are checked with it, each may name code."""
        names = [name for name in self.manifest.files if name.endswith(CONFIG)]
        return {name: self._read_config(name) for name in names}[CONFIG]

    def _read_config(self, name: str) -> dict[str, Any]:
        if self.manifest.files[name].size > MAX_CONFIG:
            raise StoreError(self.path / name, "the config is absurdly large", _REPAIR)
        self.check_file(name)
        return read_config(self.path / name)


def read_config(file: Path) -> dict[str, Any]:
    """A JSON config that asks to run no code. Raises StoreError or ConfigRefused."""
    try:
        config = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise StoreError(file, f"it is not JSON ({error})", _REPAIR) from error
    if not isinstance(config, dict):
        raise StoreError(file, "it is not a JSON object", _REPAIR)
    refuse_code(config, file)
    return config


def refuse_code(config: Mapping[str, Any], path: Path) -> None:
    """Raise ConfigRefused if a config, or a part of it, names code to be run."""
    for entry in REFUSED_ENTRIES:
        if config.get(entry):
            raise ConfigRefused(path, entry)
    for value in config.values():
        if isinstance(value, dict):
            refuse_code(value, path)


def is_vocabulary(name: str) -> bool:
    """Whether a file of this name can hold a tokenizer's vocabulary."""
    return name in ("tokenizer.json", "vocab.json", "vocab.txt") or name.endswith(
        (".model", ".tiktoken")
    )


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


def _bad_block(store: Path, spec: LayerSpec, expert: int, problem: str) -> StoreCorrupt:
    where = f"block ({spec.layer}, {expert}) at offset {spec.offset(expert)}"
    return StoreCorrupt(store / spec.file, f"{where} {problem}", _REPAIR)


def _unreadable(path: Path, error: OSError) -> StoreError:
    reason = error.strerror or str(error)
    return StoreError(path, f"it cannot be read ({reason})", "check the disk and the permissions")

"""Fetch a checkpoint from the model hub: only the files that count, resumable, checked at the end.

huggingface_hub does the talking, and reads HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE itself. Its own
snapshot_download begins a file anew after a crash, and a file is gigabytes: so which files, where
they stand meanwhile and from which byte on they are asked for is decided here.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Lock, Thread

from huggingface_hub import HfApi, constants, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # documented
from huggingface_hub.utils.tqdm import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)

from expert_network import disk
from expert_network.errors import DiskFull, ExpertNetworkError, HubError, StoreError
from expert_network.progress import Progress, silent

# Everything but weights: configs, indexes, tokenizers. Folders, code and pictures stay there.
_WANTED = re.compile(r"[\w.-]+\.(json|model|tiktoken|jinja)|vocab\.txt|merges\.txt", re.ASCII)
_CONFIGS = ("config.json", "tokenizer_config.json")
_MARK = ".expert-network.json"
_PART = ".part"  # of a file that has not all arrived
_WORKERS = 4  # files at once: one connection seldom fills a fast line
_CHUNK = 4 << 20  # bytes hashed at once
_AGAIN = "run the same command again, it goes on from what has arrived"


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repo: its bytes, and their sha256 where the hub knows it (weights)."""

    size: int
    sha256: str | None = None


@dataclass(frozen=True)
class Snapshot:
    """One commit of a model repo and the files that are wanted of it."""

    repo: str
    revision: str
    commit: str
    files: Mapping[str, RemoteFile]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())

    def missing(self, folder: Path) -> list[str]:
        """The files that are not in `folder`, or not whole."""
        return [name for name, file in self.files.items() if _size(folder / name) != file.size]


def find(repo: str, revision: str | None, folder: Path) -> Snapshot:
    """Ask the hub what `repo` holds; in offline mode, what an earlier run noted in `folder`.

    Raises HubError with a sentence for a repo that is absent, private or gated, one without
    safetensors, a hub that cannot be reached, and offline mode.
    """
    revision = revision or constants.DEFAULT_REVISION
    with _hub_errors(repo, revision):
        try:
            info = HfApi().model_info(repo, revision=revision, files_metadata=True)
        except OfflineModeIsEnabled:
            known = _read_mark(folder)
            if known is None or (known.repo, known.revision) != (repo, revision):
                raise
            return known
    present = {
        file.rfilename: RemoteFile(file.size or 0, file.lfs.sha256 if file.lfs else None)
        for file in info.siblings or ()
    }
    return Snapshot(repo, revision, info.sha or revision, wanted(repo, present))


def wanted(repo: str, present: Mapping[str, RemoteFile]) -> dict[str, RemoteFile]:
    """Of the files in a repo, those that a conversion reads. Raises HubError without weights."""
    shards = [name for name in present if re.fullmatch(r"[\w.-]+\.safetensors", name, re.ASCII)]
    # Some repos keep the same weights a second time under another name.
    shards = [name for name in shards if name.startswith("model")] or shards
    if not shards or "config.json" not in present:
        lacks = "config.json" if shards else "safetensors files"
        raise HubError(repo, f"it has no {lacks}", "choose a repo with a converted checkpoint")
    others = [name for name in present if _WANTED.fullmatch(name)]
    return {name: present[name] for name in sorted({*shards, *others})}


def cached(snapshot: Snapshot) -> Path | None:
    """The folder in huggingface_hub's own cache, if another program has fetched all of it."""
    first = next(iter(snapshot.files))
    file = try_to_load_from_cache(snapshot.repo, first, revision=snapshot.commit)
    if not isinstance(file, str) or snapshot.missing(Path(file).parent):
        return None
    return Path(file).parent


@contextmanager
def prepared(snapshot: Snapshot, folder: Path) -> Iterator[None]:
    """Hold `folder` as the place for this snapshot; what another one left there is removed.

    If nothing has arrived by the end, neither does the folder stay. Raises StoreError if it holds
    something that no download put there, or if another process downloads into it.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / _MARK).exists():
        advice = "remove it, or choose another place with -o"
        raise StoreError(folder, "this folder is in the way of the download", advice)
    held = disk.lock(folder)
    if held is None:
        problem, advice = "another process is downloading into it now", "wait until it ends"
        raise StoreError(folder, problem, advice)
    try:
        known = _read_mark(folder)
        if known is not None and (known.repo, known.commit) != (snapshot.repo, snapshot.commit):
            for path in folder.iterdir():
                path.unlink()
        with disk.replacing(folder / _MARK) as mark:
            mark.write(json.dumps(asdict(snapshot)).encode())
        yield
    finally:
        if not any(_size(path) > 0 for path in folder.glob("*") if path.name != _MARK):
            shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def fetch_configs(snapshot: Snapshot, folder: Path) -> None:
    """Fetch the few kilobytes that tell whether the rest is worth fetching."""
    names = [name for name in _CONFIGS if name in snapshot.files]
    _fetch(snapshot, [name for name in names if name in snapshot.missing(folder)], folder, silent)


def fetch(snapshot: Snapshot, folder: Path, report: Progress, then: int = 0) -> None:
    """Fetch what is missing. Raises HubError, DiskFull; `folder` is held by `prepared`.

    `then` counts the bytes that will be written beside it: there must be room for both.
    """
    missing = snapshot.missing(folder)
    if not missing:
        return
    there = sum(max(_size(folder / (name + _PART)), 0) for name in missing)
    needed = sum(snapshot.files[name].size for name in missing) - there + then
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DiskFull(folder, needed, free)
    _fetch(snapshot, missing, folder, report)


# --- fetching


class _Tally:
    """What all files together have received, and the word to stop."""

    def __init__(self, done: int, total: int, report: Progress) -> None:
        self._done, self._total, self._report = done, total, report
        self.lock = Lock()
        self.stop = Event()

    def add(self, count: int) -> None:
        with self.lock:
            self._done += count
            self._report(self._done, self._total, "downloading")


class _Part:
    """The file that http_get writes into: counts, and breaks off when another file has failed."""

    def __init__(self, path: Path, tally: _Tally) -> None:
        self._file, self._tally = path.open("ab"), tally

    def write(self, data: bytes) -> int:
        if self._tally.stop.is_set():
            raise InterruptedError("another file failed")
        self._file.write(data)
        self._tally.add(len(data))
        return len(data)

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, position: int) -> int:
        return self._file.seek(position)

    def truncate(self) -> int:
        """Called where a server ignored from which byte on it was asked to send."""
        self._tally.add(self._file.tell() - os.fstat(self._file.fileno()).st_size)
        return self._file.truncate()

    def close(self) -> None:
        self._file.close()


def _fetch(snapshot: Snapshot, names: list[str], folder: Path, report: Progress) -> None:
    parts = sum(max(_size(folder / (name + _PART)), 0) for name in names)
    missing = sum(snapshot.files[name].size for name in names)
    tally = _Tally(snapshot.nbytes - missing + parts, snapshot.nbytes, report)
    with _hub_errors(snapshot.repo, snapshot.revision, folder), _quiet():
        tally.add(0)
        _side_by_side(
            [partial(_fetch_file, snapshot, name, folder, tally) for name in names], tally
        )


def _side_by_side(jobs: list[Callable[[], None]], tally: _Tally) -> None:
    """Do the jobs in a few threads; the first that fails stops them all and is raised."""
    todo, ends = iter(jobs), SimpleQueue[Exception | None]()

    def work() -> None:
        try:
            while not tally.stop.is_set():
                with tally.lock:
                    job = next(todo, None)
                if job is None:
                    break
                job()
            ends.put(None)
        except Exception as error:
            ends.put(error)

    # Daemons, so that Ctrl-C need not wait for a server that is silent.
    threads = [Thread(target=work, daemon=True) for _ in range(min(_WORKERS, len(jobs)))]
    for thread in threads:
        thread.start()
    try:
        for _ in threads:
            if error := ends.get():
                raise error
    finally:
        tally.stop.set()
        for thread in threads:
            thread.join(timeout=1)


def _fetch_file(snapshot: Snapshot, name: str, folder: Path, tally: _Tally) -> None:
    remote, path = snapshot.files[name], folder / (name + _PART)
    if _size(path) > remote.size or remote.sha256 is None:
        path.unlink(missing_ok=True)  # nothing would tell whether the pieces fit together
    part = _Part(path, tally)
    try:
        http_get(
            hf_hub_url(snapshot.repo, name, revision=snapshot.commit),
            part,  # type: ignore[arg-type]  # it writes, seeks, tells and truncates, no more
            resume_size=part.tell(),
            headers=build_hf_headers(),
            expected_size=remote.size,
        )
    finally:
        part.close()
    if remote.sha256 is not None and _sha256(path) != remote.sha256:
        path.unlink()
        raise HubError(snapshot.repo, f"{name} arrived damaged", _AGAIN)
    disk.rename(path, folder / name)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_CHUNK):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def _quiet() -> Iterator[None]:
    """huggingface_hub draws no bars and logs no advice: both are ours to give."""
    logger, drawn = logging.getLogger("huggingface_hub"), not are_progress_bars_disabled()
    level = logger.level
    logger.setLevel(logging.ERROR)
    disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if drawn:
            enable_progress_bars()


# --- what goes wrong


@contextmanager
def _hub_errors(repo: str, revision: str, folder: Path | None = None) -> Iterator[None]:
    """Whatever the hub, the net or the disk may do, as one sentence."""
    try:
        yield
    except ExpertNetworkError:
        raise
    except Exception as error:  # huggingface_hub lets through what its transports raise
        if folder is not None and getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(folder, None, shutil.disk_usage(folder).free) from error
        raise HubError(repo, *_explain(repo, revision, error)) from error


def _explain(repo: str, revision: str, error: Exception) -> tuple[str, str]:
    """Problem and advice for what huggingface_hub raised."""
    login = "log in with `hf auth login` or set HF_TOKEN"
    match error:
        case GatedRepoError():
            page = f"{constants.ENDPOINT}/{repo}"
            return "its owner asks for consent first", f"give it at {page}, then {login}"
        case RevisionNotFoundError():
            return f"it has no revision {revision!r}", "look at its branches and tags"
        case RepositoryNotFoundError():
            advice = f"check the name, see `expert-net models`, or {login} if it is private"
            return f"{constants.ENDPOINT} has no such model, or it is private", advice
        case HFValidationError():
            return "this is no name of a model repo", "write it as org/name"
        case OfflineModeIsEnabled():
            return "HF_HUB_OFFLINE is set", "unset it, or give the path of a checkpoint"
        case HfHubHTTPError():
            status = error.response.status_code
            if status in (401, 403):
                return f"{constants.ENDPOINT} refuses access ({status})", login
            return f"{constants.ENDPOINT} answered with {status}", f"later, {_AGAIN}"
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    problem = f"the download from {constants.ENDPOINT} broke off ({reason})"
    return problem, f"check the connection, then {_AGAIN}"


def _size(file: Path) -> int:
    """A file's bytes; -1 if there is none."""
    try:
        return file.stat().st_size if file.is_file() else -1
    except OSError:
        return -1


def _read_mark(folder: Path) -> Snapshot | None:
    """What an earlier run noted; None if there is nothing, or nothing whole."""
    try:
        fields = json.loads((folder / _MARK).read_text())
        files = {name: RemoteFile(**file) for name, file in fields.pop("files").items()}
        return Snapshot(**fields, files=files)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None

"""Fetch a checkpoint from the model hub: only the files that count, resumable, checked at the end.

huggingface_hub does the talking, and reads HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE itself. What is
ours: which files, whether all of them arrived, and what is said when they do not.
"""

from __future__ import annotations

import errno
import json
import logging
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)

from expert_network.errors import DiskFull, HubError, StoreError
from expert_network.progress import Progress

# Everything but weights: configs, indexes, tokenizers. Folders, code and pictures stay there.
_WANTED = re.compile(r"[\w.-]+\.(json|model|tiktoken|jinja)|vocab\.txt|merges\.txt", re.ASCII)
_CONFIGS = ("config.json", "tokenizer_config.json")
_MARK = ".expert-network.json"
_WATCH_S = 0.25  # between two looks at how much has arrived
_AGAIN = "run the same command again, it goes on from what has arrived"


@dataclass(frozen=True)
class Snapshot:
    """One commit of a model repo and the files that are wanted of it, with their bytes."""

    repo: str
    revision: str
    commit: str
    files: dict[str, int]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())

    def missing(self, folder: Path) -> list[str]:
        """The files that are not in `folder`, or not whole."""
        return [name for name, size in self.files.items() if _size(folder / name) != size]


def find(repo: str, revision: str | None, folder: Path) -> Snapshot:
    """Ask the hub what `repo` holds; without the hub, what an earlier run noted in `folder`.

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
    present = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    return Snapshot(repo, revision, info.sha or revision, wanted(repo, present))


def wanted(repo: str, present: dict[str, int]) -> dict[str, int]:
    """Of the files in a repo, those that a conversion reads. Raises HubError without weights."""
    shards = [name for name in present if re.fullmatch(r"[\w.-]+\.safetensors", name, re.ASCII)]
    # Some repos keep the same weights a second time under another name.
    shards = [name for name in shards if name.startswith("model")] or shards
    if not shards or "config.json" not in present:
        lacks = "config.json" if shards else "safetensors files"
        raise HubError(repo, f"it has no {lacks}", "choose a repo with a converted checkpoint")
    others = [name for name in present if _WANTED.fullmatch(name)]
    return {name: present[name] for name in sorted({*shards, *others})}


def prepare(snapshot: Snapshot, folder: Path) -> None:
    """Make `folder` the place for this snapshot; what another one left there is removed.

    Raises StoreError if the folder holds something that no download put there.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / _MARK).exists():
        advice = "remove it, or choose another place with -o"
        raise StoreError(folder, "this folder is in the way of the download", advice)
    known = _read_mark(folder)
    if known is not None and (known.repo, known.commit) != (snapshot.repo, snapshot.commit):
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARK).write_text(json.dumps(asdict(snapshot)))


def fetch_configs(snapshot: Snapshot, folder: Path) -> None:
    """Fetch the few kilobytes that tell whether the rest is worth fetching."""
    names = [name for name in _CONFIGS if name in snapshot.files]
    _fetch(snapshot, names, folder)


def fetch(snapshot: Snapshot, folder: Path, report: Progress, then: int = 0) -> None:
    """Fetch what is missing and check that all of it is there. Raises HubError, DiskFull.

    `then` counts the bytes that will be written beside it: there must be room for both.
    """
    missing = snapshot.missing(folder)
    if not missing:
        return
    free, needed = shutil.disk_usage(folder).free, snapshot.nbytes - _arrived(folder) + then
    if needed > free:
        raise DiskFull(folder, needed, free)
    with _watching(snapshot, folder, report):
        _fetch(snapshot, missing, folder)
    if missing := snapshot.missing(folder):
        raise HubError(snapshot.repo, f"{missing[0]} did not arrive whole", _AGAIN)


def _fetch(snapshot: Snapshot, names: list[str], folder: Path) -> None:
    with _hub_errors(snapshot.repo, snapshot.revision, folder), _quiet():
        snapshot_download(
            snapshot.repo,
            revision=snapshot.commit,
            local_dir=folder,
            allow_patterns=names,
        )


@contextmanager
def _hub_errors(repo: str, revision: str, folder: Path | None = None) -> Iterator[None]:
    """Whatever the hub, the net or the disk may do, as one sentence."""
    try:
        yield
    except (HubError, DiskFull):
        raise
    except Exception as error:  # huggingface_hub lets through what its several transports raise
        if folder is not None and getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(folder, None, shutil.disk_usage(folder).free) from error
        raise HubError(repo, *_explain(repo, revision, error)) from error


def _explain(repo: str, revision: str, error: Exception) -> tuple[str, str]:
    """Problem and advice for what huggingface_hub raised, or what that was raised from."""
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
    cause = error.__cause__
    if isinstance(cause, Exception) and not isinstance(error, HfHubHTTPError):
        return _explain(repo, revision, cause)
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    problem = f"the download from {constants.ENDPOINT} broke off ({reason})"
    return problem, f"check the connection, then {_AGAIN}"


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


@contextmanager
def _watching(snapshot: Snapshot, folder: Path, report: Progress) -> Iterator[None]:
    """Report what has arrived on the disk, whichever way the files travel."""
    over = threading.Event()

    def look() -> None:
        report(min(_arrived(folder), snapshot.nbytes), snapshot.nbytes, "downloading")

    def watch() -> None:
        look()
        while not over.wait(_WATCH_S):
            look()

    thread = threading.Thread(target=watch, name="download watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    look()


def _arrived(folder: Path) -> int:
    """Bytes of all files below `folder`, unfinished ones and huggingface_hub's notes included."""
    return sum(max(_size(file), 0) for file in folder.rglob("*"))


def _size(file: Path) -> int:
    """A file's bytes; -1 if there is none (huggingface_hub renames while others look)."""
    try:
        return file.stat().st_size if file.is_file() else -1
    except OSError:
        return -1


def _read_mark(folder: Path) -> Snapshot | None:
    try:
        return Snapshot(**json.loads((folder / _MARK).read_text()))
    except (OSError, ValueError, TypeError):
        return None

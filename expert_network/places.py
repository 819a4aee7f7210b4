"""Where stores and caches stand on this machine, and how a store's name becomes a path."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_data_path

from expert_network.errors import StoreError

MANIFEST = "manifest.json"
PARTIAL = ".partial"  # a writer's working folder: never a store, whatever it holds


def home(override: Path | None) -> Path:
    """`override`, or the user's data directory for this program. Not created here."""
    if override is not None:
        return override.expanduser()
    return user_data_path("expert-network", appauthor=False)


def models_dir(home: Path) -> Path:
    """The folder whose sub-folders are stores that can be called by name."""
    return home / "models"


def cache_dir(home: Path) -> Path:
    """The folder for what was fetched from peers, by model digest."""
    return home / "cache"


def is_store(path: Path) -> bool:
    """Whether `path` looks like a finished store; opening it is what checks it."""
    return path.suffix != PARTIAL and (path / MANIFEST).is_file()


def stores(home: Path) -> list[Path]:
    """Every finished store in the models folder, sorted by name; `org/name` counts too."""
    root = models_dir(home)
    found = {
        manifest.parent for depth in ("*", "*/*") for manifest in root.glob(f"{depth}/{MANIFEST}")
    }
    return sorted(path for path in found if is_store(path))


def find_store(name_or_path: str | Path, home: Path) -> Path:
    """The folder that `name_or_path` means: a path, or a name in the models folder.

    A bare name is first looked for in the current folder, and taken from there if a store
    stands there. Raises StoreError naming what is available if nothing of that name exists.
    """
    text = os.fspath(name_or_path)
    path = Path(text).expanduser()
    named = models_dir(home) / text
    spelled_as_path = path.is_absolute() or text.startswith((".", "~"))
    if spelled_as_path or is_store(path):
        return _existing(path, home)
    if is_store(named):
        return named
    return _existing(path, home)


def place_for(name_or_path: str | Path, home: Path) -> Path:
    """Where a store of that name or path is, or may be made."""
    path = Path(name_or_path).expanduser()
    is_name = not path.is_dir() and path == Path(path.name) and not path.name.startswith(".")
    return models_dir(home) / path if is_name else path


def only_store(home: Path) -> Path:
    """The one store in the models folder. Raises StoreError if there is none, or several."""
    found = stores(home)
    if len(found) == 1:
        return found[0]
    root = models_dir(home)
    if not found:
        raise StoreError(root, "no store stands here", "name one, or see `expert-net models`")
    raise StoreError(root, f"several stores stand here ({_names(found, root)})", "name one of them")


def _existing(path: Path, home: Path) -> Path:
    if path.is_dir():
        return path
    if path.exists():
        raise StoreError(path, "this is a file and a store is a folder", "give the store's folder")
    root = models_dir(home)
    found = stores(home)
    known = f"it has {_names(found, root)}" if found else "it is empty"
    raise StoreError(
        path,
        f"there is no such folder, nor a store of that name in {root} ({known})",
        "check the spelling, or make a store with `expert-net download` or `expert-net preprocess`",
    )


def _names(found: list[Path], root: Path) -> str:
    return ", ".join(path.relative_to(root).as_posix() for path in found)

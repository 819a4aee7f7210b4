"""How much memory this machine, container or service can still give, and how much we took.

A process in a container sees the memory of the whole machine; what ends it is the limit of one of
the control groups above it. Both versions of control groups are read, ancestors included.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import psutil

_PROC = Path("/proc/self")


class _Files(NamedTuple):
    """What one version of control groups calls its files, and its reclaimable page cache."""

    limits: tuple[str, ...]
    usage: str
    cache: tuple[str, ...]


# memory.high does not kill, but a process that loads beyond it is slowed down to a standstill.
_V2 = _Files(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))
_V1 = _Files(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)


def available_memory(backend: str = "mlx-cpu") -> int:
    """Bytes that can be taken now, where the MLX backend of this name keeps weights.

    On "mlx-cuda" what the device has free. Elsewhere what can be had without swapping or being
    ended for it: the least of what the system calls available and what each control group above
    this process leaves: its limit, minus its use, plus the file cache that the kernel would give up
    for us.
    """
    if backend == "mlx-cuda" and (free := _device_available()) is not None:
        return free
    return max(0, min([_system_available(), *control_group_room(_PROC)]))


def peak_rss() -> int:
    """The most bytes of memory that were resident at one time in this process."""
    own = _status_bytes(_PROC / "status", "VmHWM")
    if own is not None:
        return own
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def control_group_room(proc: Path) -> list[int]:
    """Bytes left by each memory control group above the process of `proc` (a /proc/PID folder)."""
    return [room for group, files in _groups(proc) if (room := _room(group, files)) is not None]


def _device_available() -> int | None:
    import mlx.core as mx

    free = mx.device_info().get("free_memory")
    return free if isinstance(free, int) else None


def _system_available() -> int:
    return int(psutil.virtual_memory().available)


def _status_bytes(status: Path, field: str) -> int | None:
    """A size of /proc/PID/status. ru_maxrss would not do there: it starts at the parent's size."""
    for line in _lines(status):
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None


def _groups(proc: Path) -> Iterator[tuple[Path, _Files]]:
    """Every folder from the process's own group up to the mount point, for both versions."""
    mounts = dict(_mounts(proc))
    for line in _lines(proc / "cgroup"):
        number, controllers, path = line.split(":", 2)
        files = _V2 if number == "0" else _V1
        if (files is _V1 and "memory" not in controllers.split(",")) or files not in mounts:
            continue
        root, point = mounts[files]
        group = point / _below(path, root)
        for folder in (group, *group.parents):
            if folder.is_relative_to(point):
                yield folder, files


def _mounts(proc: Path) -> Iterator[tuple[_Files, tuple[str, Path]]]:
    """Where each version's memory groups are mounted, and which of them is at the mount's root."""
    for line in _lines(proc / "mountinfo"):
        fields, _, rest = line.partition(" - ")
        root, point = (_unescape(word) for word in fields.split()[3:5])
        kind, _, options = rest.split(maxsplit=2)
        if kind == "cgroup2":
            yield _V2, (root, Path(point))
        elif kind == "cgroup" and "memory" in options.split(","):
            yield _V1, (root, Path(point))


def _below(path: str, root: str) -> str:
    """The group's path under the mount; a container's mount may begin at the group itself."""
    group = PurePosixPath(path)
    return str(group.relative_to(root if group.is_relative_to(root) else group))


def _room(group: Path, files: _Files) -> int | None:
    """What `group` leaves, or None where it sets no limit or cannot be read."""
    limits = [limit for name in files.limits if (limit := _number(group / name)) is not None]
    usage = _number(group / files.usage)
    if not limits or usage is None:
        return None
    return min(limits) - usage + _reclaimable(group / "memory.stat", files.cache)


def _reclaimable(stat: Path, names: tuple[str, ...]) -> int:
    counts = dict(line.split(maxsplit=1) for line in _lines(stat) if " " in line)
    return sum(int(counts.get(name, 0)) for name in names)


def _number(path: Path) -> int | None:
    """The number in a one-line file; None when it says "max" or is not there."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _unescape(word: str) -> str:
    """mountinfo writes a space in a path as \\040."""
    return word.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")

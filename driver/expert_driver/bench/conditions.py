"""The conditions of a measurement: without them a figure says nothing."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from expert_network import __version__

_PACKAGES = ("mlx", "mlx-lm", "numpy")


def conditions(packages: Iterable[str] = _PACKAGES) -> dict[str, Any]:
    """Machine, versions, load and date, as JSON; the load is the mean of the last minute."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load": load(),
        "python": platform.python_version(),
        "expert-network": __version__,
        "packages": {name: found for name in packages if (found := _version(name))},
    }


def cpu() -> str:
    """What the processor calls itself."""
    if sys.platform == "darwin":
        asked = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        return done.stdout.strip() or platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load() -> float:
    """Processes that wanted to run, on average over the last minute."""
    return round(os.getloadavg()[0], 2)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None

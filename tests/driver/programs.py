"""`expert-net` as a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import expert_driver

#: The store that the package carries.
DEMO_STORE = Path(expert_driver.__file__).parent / "demo_store"

COMMAND = (sys.executable, "-m", "expert_driver")


def environment(**changes: str) -> dict[str, str]:
    """That of whoever runs the tests, without what would be options of ours."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("EXPERT_")}
    return {**kept, **changes}


def expert_net(
    *arguments: str | Path, stdin: str = "", seconds: float = 120.0, **changes: str
) -> subprocess.CompletedProcess[str]:
    """Run `expert-net` to its end."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=seconds,
        env=environment(**changes),
    )

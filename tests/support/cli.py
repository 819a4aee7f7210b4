"""Run `expert-net` as a person does: a process, its two outputs, its exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

TIMEOUT_S = 120


def command_line(*words: str | Path) -> list[str]:
    """The argv of `expert-net WORDS`."""
    return [sys.executable, "-m", "expert_driver", *map(str, words)]


def environment(home: Path, **more: str) -> dict[str, str]:
    """This process's environment without what would change a command, and with `home` for all."""
    prefixes = ("EXPERT_", "HF_", "HUGGING")
    clean = {key: value for key, value in os.environ.items() if not key.startswith(prefixes)}
    return clean | {"EXPERT_NETWORK_HOME": str(home), "HF_HOME": str(home / "hf")} | more


def expert_net(
    *words: str | Path, env: Mapping[str, str], cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end; never raises for its exit code."""
    return subprocess.run(
        command_line(*words),
        env=dict(env),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )

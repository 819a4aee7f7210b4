"""What a process took, measured from outside."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def peak_of(command: Sequence[str | Path], env: Mapping[str, str]) -> int:
    """Run `command` to its end and return its peak resident memory in bytes.

    Never less than what this process has in memory, which the system counts as the child's before
    it becomes `command`. A command that fails fails the test.
    """
    process = subprocess.Popen([str(word) for word in command], env=dict(env))
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, f"{command} ended with {process.returncode}"
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)

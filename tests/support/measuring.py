"""What a process took, measured from outside."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# A child's peak starts at what its parent has in memory: so a parent that has next to nothing
# starts it, and not the one that has run two thousand tests.
_PARENT = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=sys.stderr)
_, status, usage = os.wait4(process.pid, 0)
print(usage.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status) != 0)
"""


def peak_of(command: Sequence[str | Path], env: Mapping[str, str]) -> int:
    """Run `command` to its end and return its peak resident memory in bytes.

    A command that fails fails the test.
    """
    words = [sys.executable, "-S", "-c", _PARENT, *map(str, command)]
    done = subprocess.run(words, env=dict(env), stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, f"{command} failed"
    return int(done.stdout) * (1 if sys.platform == "darwin" else 1024)

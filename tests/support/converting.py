"""A conversion in a process of its own, that stops where it is told and waits.

The child prints "at BYTES" when that much is done, then reads a line before it goes on; at the end
it prints "done DIGEST PEAK", the peak in bytes of resident memory, above what imports took.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def converting(
    src: Path, out: Path, *, stop_at: int | None = None, bits: int | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Start the child; it is killed at the end if it still runs."""
    words = [str(src), str(out), str(stop_at or -1), str(bits or 0)]
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.converting", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def line(child: subprocess.Popen[str]) -> list[str]:
    """The words of the child's next line; waits for it."""
    assert child.stdout is not None
    return child.stdout.readline().split()


def go_on(child: subprocess.Popen[str]) -> None:
    """Let a child that has stopped go on."""
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()


def main(src: str, out: str, stop_at: str, bits: str) -> None:
    """The child."""
    from expert_network.backend import detect
    from expert_network.memory import peak_rss
    from expert_network.store.convert import preprocess

    detect()
    before = peak_rss()
    stops = [int(stop_at)] if int(stop_at) >= 0 else []

    def progress(done: int, total: int, what: str) -> None:
        if stops and done >= stops[0]:
            stops.clear()
            print("at", done, flush=True)
            sys.stdin.readline()

    store = preprocess(src, out, int(bits) or None, progress=progress)
    print("done", store.digest, peak_rss() - before, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Looking for a while before sleeping, where cores are free.

A core that fell asleep wakes late, and slow: what it had at hand is gone. With a node and a driver
on 16 cores and one GPU a layer took 1.4 ms when both slept while the other one worked, and 1.0 ms
when both looked. On two cores looking takes from others what it saves here.
"""

from __future__ import annotations

import os
import select
from time import perf_counter

#: Seconds to look: about what a layer's round trip takes.
LOOK_S = 0.002
#: Usable cores from which one is free to look.
CORES = 4
#: Waits without looking after one that looked for nothing, twice as many after each more.
MOST_SKIPPED = 63


class Patience:
    """How one thread that waits for sockets looks before it sleeps: not if that was no use lately.

    seconds: how long; 0 for never.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._seconds = _seconds() if seconds is None else seconds
        self._skip = self._skipped = 0

    @property
    def looks(self) -> bool:
        """Whether `look` ever does."""
        return self._seconds > 0

    def look(self, sockets: select.poll) -> bool:
        """Whether something came while we looked. Returns at once where looking is no use."""
        if not self._seconds:
            return False
        if self._skip:
            self._skip -= 1
            return False
        until = perf_counter() + self._seconds
        while not sockets.poll(0):
            if perf_counter() > until:
                self._skip = self._skipped = min(2 * self._skipped + 1, MOST_SKIPPED)
                return False
        self._skipped = 0
        return True


def _seconds() -> float:
    """LOOK_S where there are CORES for this process."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return LOOK_S if cores >= CORES else 0.0

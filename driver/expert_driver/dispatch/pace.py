"""How fast a node answers single rows, and how long its silence may last before it means death."""

from __future__ import annotations

from collections import deque

#: The least silence that is taken for death. A node that computes for long says WORKING after half
#: a second to one and a half, and a busy machine may be late with that.
LEAST_S = 2.0
#: Silence for each second that the slowest of the last replies took.
PATIENCE = 8.0
#: Replies that are looked back on, and how many there must have been.
KEPT, ENOUGH = 64, 16


class Pace:
    """The newest times of a link's replies to single rows, in seconds."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=KEPT)

    def saw(self, seconds: float) -> None:
        """Count a reply."""
        self._times.append(seconds)

    @property
    def silence(self) -> float:
        """Seconds without a frame after which the node is given up; infinite if not known yet."""
        if len(self._times) < ENOUGH:
            return float("inf")
        return LEAST_S + PATIENCE * max(self._times)

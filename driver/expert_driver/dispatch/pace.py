"""How fast single rows are answered, and how long a node may then be silent before it is dead."""

from __future__ import annotations

from collections import deque

#: The least silence that is taken for death. A node that computes for long says WORKING after half
#: a second to one and a half, and a busy machine may be late with that.
LEAST_S = 2.0
#: Silence for each second that dispatches took, but for the slowest tenth of them.
PATIENCE = 8.0
#: Dispatches that are looked back on, and how many there must have been.
KEPT, ENOUGH = 64, 16


class Pace:
    """The newest times of dispatches of one row, in seconds."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=KEPT)

    def saw(self, seconds: float) -> None:
        """Count a dispatch that was answered."""
        self._times.append(seconds)

    @property
    def late(self) -> float:
        """Seconds that one dispatch in twenty takes longer than; infinite if not known yet."""
        if len(self._times) < ENOUGH:
            return float("inf")
        return sorted(self._times)[len(self._times) * 19 // 20]

    @property
    def silence(self) -> float:
        """Seconds without a frame after which a node is given up; infinite if not known yet."""
        if len(self._times) < ENOUGH:
            return float("inf")
        return LEAST_S + PATIENCE * sorted(self._times)[len(self._times) * 9 // 10]

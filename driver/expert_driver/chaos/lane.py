"""One direction of a proxied connection: what came, when it is due, and what is done to it."""

from __future__ import annotations

import socket
from collections import deque
from random import Random

from expert_driver.chaos.faults import Corrupt, Delay, Drip, Fault, HalfOpen, Throttle

_PIECE = 1 << 18  # bytes of one read
_WAITING = 1 << 26  # bytes; no more is read while so much is on its way
_SLICE_S = 0.01  # how finely a throttle cuts


class Lane:
    """Hands on what comes from `source` to `target`, both non-blocking, in order."""

    def __init__(self, source: socket.socket, target: socket.socket, random: Random) -> None:
        self.source, self.target = source, target
        #: `target` takes nothing now.
        self.blocked = False
        self.ended = False
        #: Bytes were lost: its connection is of no use any more.
        self.silent = False
        self._random = random
        # When it is due, and the bytes; nothing stands for the end, which is delayed like bytes.
        self._waiting: deque[tuple[float, memoryview]] = deque()
        self._size = 0
        self._flips: list[tuple[int, int]] = []
        self._free_at = 0.0
        self.heal()

    def suffer(self, fault: Fault) -> None:
        """Have what comes from now on suffer `fault`, if it concerns a direction."""
        match fault:
            case Delay(seconds, jitter):
                self._delay_s, self._jitter_s = seconds, jitter
            case Throttle(rate):
                self._slice, self._byte_s = max(1, int(rate * _SLICE_S)), 1 / rate
            case Drip(seconds):
                self._slice, self._byte_s = 1, seconds
            case HalfOpen():
                self.silent = True
            case Corrupt(offset, bit):
                self._flips.append((offset, 1 << bit))

    def heal(self) -> None:
        """Have what comes from now on pass as it is."""
        self._delay_s = self._jitter_s = 0.0
        self._slice, self._byte_s = _PIECE, 0.0
        self._flips.clear()

    @property
    def full(self) -> bool:
        """Whether so much waits that no more should be read."""
        return self._size > _WAITING

    @property
    def over(self) -> bool:
        """Whether its end has come and gone on to the other side."""
        return self.ended and not self._waiting

    def read(self) -> bytes | None:
        """What is there; nothing at the end, None if it was a false alarm. Raises OSError."""
        try:
            return self.source.recv(_PIECE)
        except BlockingIOError:
            return None

    def put(self, data: bytes, now: float) -> None:
        """Have `data` handed on when its time comes; nothing ends the lane."""
        self.ended = self.ended or not data
        if self.silent:
            return
        if self._flips:
            data = self._corrupted(data)
        due = now + self._delay_s + self._random.uniform(0, self._jitter_s)
        if self._waiting:
            due = max(due, self._waiting[-1][0])
        self._waiting.append((due, memoryview(data)))
        self._size += len(data)

    def write(self, now: float) -> None:
        """Hand on what is due, as far as the target takes it. Raises OSError."""
        self.blocked = False
        while self._waiting and max(self._waiting[0][0], self._free_at) <= now:
            due, data = self._waiting[0]
            try:
                sent = self._send(data[: self._slice])
            except BlockingIOError:
                self.blocked = True
                return
            self._size -= sent
            self._free_at = max(now, self._free_at) + sent * self._byte_s
            if sent == len(data):
                self._waiting.popleft()
            else:
                self._waiting[0] = (due, data[sent:])

    def next_at(self) -> float | None:
        """When something can be handed on; None if nothing waits or the target takes nothing."""
        if self.blocked or not self._waiting:
            return None
        return max(self._waiting[0][0], self._free_at)

    def _send(self, data: memoryview) -> int:
        if data:
            return self.target.send(data)
        self.target.shutdown(socket.SHUT_WR)
        return 0

    def _corrupted(self, data: bytes) -> bytes:
        changed, later = bytearray(data), []
        for offset, mask in self._flips:
            if offset < len(changed):
                changed[offset] ^= mask
            else:
                later.append((offset - len(changed), mask))
        self._flips = later
        return bytes(changed)

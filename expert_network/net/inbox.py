"""What has come of a link's frames: one piece of memory, filled as far as the kernel has bytes.

One read takes a small frame whole, header and payload, and whatever else is there. A large payload
gets memory of its own size, so that nothing of it is copied but what came with its header.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

import numpy as np

#: The memory that an inbox starts with: it holds a batch-1 dispatch of any model.
FIRST_BUFFER = 64 << 10
#: Memory that one large frame made larger than this is given back after it.
KEPT_BUFFER = 2 << 20
# Where a frame may start, so that its numbers are aligned as the longest of them wants it.
_ALIGNED = 8

E_co = TypeVar("E_co", covariant=True)
E = TypeVar("E")


class Receiver(Protocol[E_co]):
    """What turns bytes into events: a connection, as expert_protocol has it."""

    @property
    def needs(self) -> int:
        """Bytes wanted next, bounded; 0 when nothing more can come."""

    def feed(self, data: memoryview, /) -> E_co | None:
        """The event that these bytes complete. Raises RemoteProtocolError."""


class Inbox(Generic[E]):
    """The bytes of one link that are not yet events."""

    def __init__(self, receiver: Receiver[E]) -> None:
        self._receiver = receiver
        self._memory = _memory(FIRST_BUFFER)
        self._size = FIRST_BUFFER
        # What came and was not fed lies from _at to _end.
        self._at = self._end = 0
        #: Whether a header was fed whose payload is not here yet.
        self._inside = False
        #: Bytes of all the frames that became events.
        self.taken = 0

    @property
    def begun(self) -> bool:
        """Whether a frame has come in part."""
        return self._inside or self._end > self._at

    @property
    def large(self) -> int:
        """The size of the payload that is awaited, if it is more than FIRST_BUFFER; else 0."""
        needs = self._receiver.needs if self._inside else 0
        return needs if needs > FIRST_BUFFER else 0

    def next(self) -> E | None:
        """The next event that is here; its arrays hold until `next` or `room` is called again.

        Raises RemoteProtocolError.
        """
        at, end = self._at, self._end
        if at == end:
            return None
        receiver, memory = self._receiver, self._memory
        if at % _ALIGNED and not self._inside:
            self._settle()
            at, end = 0, self._end
        while (needs := receiver.needs) and at + needs <= end:
            event = receiver.feed(memory[at : at + needs])
            self._at = at = at + needs
            self.taken += needs
            if event is not None:
                self._inside = False
                return event
            self._inside = True
        return None

    def room(self) -> memoryview:
        """Where the next bytes go: at least one byte, and as many as may come at once."""
        needs = self._receiver.needs
        if needs > self._size or (self._size > KEPT_BUFFER and needs <= KEPT_BUFFER):
            self._renew(max(needs, FIRST_BUFFER))
        elif self._at:
            self._settle()
        if needs > FIRST_BUFFER:
            return self._memory[self._end : needs]
        return self._memory[self._end :] if self._end else self._memory

    def came(self, count: int) -> None:
        """Say that `count` bytes of `room` have been filled."""
        self._end += count

    def clear(self) -> None:
        """Let go of the memory; nothing may come any more."""
        self._memory, self._size, self._at, self._end = _memory(0), 0, 0, 0

    def _settle(self) -> None:
        """Move what is left to the front."""
        left = self._end - self._at
        if left:
            self._memory[:left] = self._memory[self._at : self._end]
        self._at, self._end = 0, left

    def _renew(self, size: int) -> None:
        # Views of the old memory keep it alive; we no longer do.
        left = self._memory[self._at : self._end]
        self._memory, self._size = _memory(size), size
        self._memory[: len(left)] = left
        self._at, self._end = 0, len(left)


def _memory(size: int) -> memoryview:
    # Unlike a bytearray, not touched before it is used: a large frame costs what has come of it.
    return np.empty(size, np.uint8).data

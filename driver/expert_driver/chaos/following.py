"""Which token a driver is at, seen in the bytes that it sends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from expert_driver.chaos.faults import Point
from expert_network.errors import RemoteProtocolError
from expert_protocol.header import HEADER_SIZE, MAGIC, Header, Kind, decode_header

#: Bytes of a request's head; nodes take no longer ones.
_MAX_HEAD = 64 << 10
_HEAD_END = b"\r\n\r\n"


class Follower:
    """Cuts one connection's bytes, as they come from a driver, where a frame begins.

    Until the Upgrade requests come, heads without bodies; then frames. What is neither, TLS for
    one, passes unread.
    """

    def __init__(self) -> None:
        self._held = bytearray()
        self._payload = 0
        self._lost = False

    def feed(self, data: bytes) -> Iterator[tuple[Header | None, bytes]]:
        """The bytes to hand on, and the header, if they start with one.

        What begins a header or a head that is not whole yet is held back: whatever happens at a
        frame happens before its first byte.
        """
        self._held += data
        while self._held:
            header = None
            if self._payload or self._lost:
                size = len(self._held) if self._lost else min(self._payload, len(self._held))
                self._payload = max(0, self._payload - size)
            elif MAGIC.startswith(self._held[: len(MAGIC)]):
                size = HEADER_SIZE if len(self._held) >= HEADER_SIZE else 0
                header = self._header() if size else None
            else:
                size = self._head_size()
            if not size:
                return
            taken = bytes(self._held[:size])
            del self._held[:size]
            yield header, taken

    def rest(self) -> bytes:
        """What is held back still, when no more comes."""
        held = bytes(self._held)
        self._held.clear()
        return held

    def _header(self) -> Header | None:
        with suppress(RemoteProtocolError):
            header = decode_header(bytes(self._held[:HEADER_SIZE]))
            self._payload = header.length
            return header
        self._lost = True
        return None

    def _head_size(self) -> int:
        """The bytes of a request's head; 0 while it is not whole."""
        end = self._held.find(_HEAD_END, 0, _MAX_HEAD)
        if end >= 0:
            return end + len(_HEAD_END)
        # A request starts with a method's name.
        self._lost = not 65 <= self._held[0] <= 90 or len(self._held) >= _MAX_HEAD
        return len(self._held) if self._lost else 0


class TokenClock:
    """Counts the tokens of a reply by the layers of its dispatches, to whatever nodes they go.

    A token is made by a pass that asks for experts of the last layer; after it comes a lower one.
    `last_layer` is the model's last MoE layer. A model with one such layer stays at token 0.
    """

    def __init__(self, last_layer: int) -> None:
        self._last = last_layer
        self.restart()

    def restart(self) -> None:
        """A reply begins: its first dispatch is token 0's."""
        self._token, self._complete = 0, False

    def at(self, header: Header) -> Point | None:
        """Where the driver is with this frame; None if it is no DISPATCH."""
        if header.kind is not Kind.DISPATCH:
            return None
        if header.layer >= self._last:
            self._complete = True
        elif self._complete:
            self._token, self._complete = self._token + 1, False
        return Point(self._token, header.layer)

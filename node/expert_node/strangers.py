"""Connections of whoever it may be: so many at a time, and no more.

A stranger may hold a connection until the deadline for a request's head. Enough of them would take
all descriptors, so the oldest goes when one too many comes. Who shows the key, or without a key
asks for anything, is no stranger any more: a driver does that within milliseconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

#: Connections at a time that have not shown the key.
MOST_STRANGERS = 64


class Strangers:
    """Makes the protocol of each new connection, as `make` does. Used on the event loop."""

    def __init__(self, most: int = MOST_STRANGERS) -> None:
        self._most = most
        self._waiting: dict[asyncio.BaseProtocol, None] = {}  # the oldest first
        self.make: Callable[[], asyncio.Protocol] | None = None

    def __call__(self) -> asyncio.Protocol:
        assert self.make is not None
        protocol = self.make()
        self._waiting[protocol] = None
        while len(self._waiting) > self._most:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            transport = getattr(oldest, "transport", None)
            if transport is not None:  # it has not left by itself
                transport.abort()
        return protocol

    def know(self, protocol: asyncio.BaseProtocol) -> None:
        """Count this connection no more: it belongs to somebody."""
        self._waiting.pop(protocol, None)

"""Stopping a reply from outside: a flag that is looked at between dispatches and tokens."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from expert_network.errors import Cancelled


class Stop:
    """A request to stop. Setting it is safe in a signal handler and from any thread."""

    def __init__(self) -> None:
        self.requested = False

    def request(self) -> None:
        self.requested = True

    def check(self) -> None:
        """Raise Cancelled if stopping was requested."""
        if self.requested:
            raise Cancelled("stopped")


@contextmanager
def stopped_by_interrupt(stop: Stop) -> Iterator[None]:
    """Within, the first Ctrl-C sets `stop` and the second raises KeyboardInterrupt.

    Only the main thread receives signals: in another one this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.request()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

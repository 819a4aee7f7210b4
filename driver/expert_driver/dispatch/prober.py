"""Nodes that do not answer, and a thread that looks whether they are back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import Condition, Thread

from expert_driver.dispatch.links import Link
from expert_network.errors import ExpertNetworkError

#: Seconds between two tries to open a link to a node that is away.
PROBE_S = 1.0


class Prober:
    """Opens links to nodes that are away, by their addresses; `back` has those that are open.

    All but the opening is for the thread that uses the links.
    """

    def __init__(self, open_link: Callable[[str], Link]) -> None:
        self._open = open_link
        self._away: set[str] = set()
        self._changed = Condition()
        self._thread: Thread | None = None
        self._ended = False
        #: Taken from the left by who uses links.
        self.back: deque[tuple[str, Link]] = deque()

    def watch(self, url: str) -> None:
        """Look from now on whether this node is back."""
        with self._changed:
            self._away.add(url)
            if self._thread is None:
                self._thread = Thread(target=self._probe, name="prober", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """End the thread, after the try that is under way, and close what it has opened."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        while self.back:
            self.back.popleft()[1].close()

    def _probe(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._away or self._ended)
                away = sorted(self._away)
            for url in away:
                if self._ended:
                    return
                with suppress(ExpertNetworkError):
                    link = self._open(url)
                    with self._changed:
                        self._away.discard(url)
                    self.back.append((url, link))
            with self._changed:
                if self._changed.wait_for(lambda: self._ended, PROBE_S):
                    return

"""The nodes of one driver: links to all of them, checked together, opened again when they break."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import monotonic

from expert_driver.dispatch.agreement import Agreement, Wanted, agree
from expert_driver.dispatch.exchange import Exchange
from expert_driver.dispatch.links import Link
from expert_driver.figures import DispatchTimes, NetworkFigures, NodeFigures

LOOK_S = 0.5  # unused for so long, a link is looked at before it is used
PING_S = 20.0  # unused for so long, its node is asked whether it is there


class Network:
    """Links to all nodes, in the order of their roster. Used by one thread.

    `ready` is to be called before every use: it opens what is closed again, with all checks.
    `observer` is told of every dispatch that all nodes have replied to.
    """

    def __init__(
        self, urls: Sequence[str], wanted: Wanted, open_link: Callable[[str], Link]
    ) -> None:
        self._urls, self.wanted, self._open = tuple(urls), wanted, open_link
        self._links: dict[str, Link] = {}
        self._used = monotonic()
        self.links: list[Link] = []
        self.exchange = Exchange()
        self.observer: Callable[[DispatchTimes], None] | None = None
        mode = "exact" if wanted.exact else "sum"
        #: What `figures` gives once all is counted.
        self.counters = NetworkFigures(mode, wanted.wire.label, len(wanted.shape), [])
        self.agreement: Agreement = self._reopen()

    def ready(self) -> Agreement:
        """See that every link is open. Raises NodeError, KeyRefused or NetworkMismatch."""
        unused = monotonic() - self._used
        if unused > LOOK_S:
            self.exchange.settle()
            for link in self.links:
                if not link.owed:
                    link.check(ping=unused > PING_S)
            self.exchange.lost |= any(link.closed for link in self.links)
        if self.exchange.lost:
            self.exchange.settle()
            self.agreement = self._reopen()
            self.exchange.lost = False
        return self.agreement

    @property
    def figures(self) -> NetworkFigures:
        """The counters of all dispatches."""
        self.exchange.count()
        return self.counters

    @property
    def traffic(self) -> int:
        """Bytes sent and received on the links that are open, counted at the sockets."""
        self.exchange.count()
        return sum(sum(link.traffic) for link in self.links)

    def used(self, rows: int, seconds: float, traffic: int) -> None:
        """Say that all links have just been used, for a dispatch as NetworkFigures counts it."""
        self._used = monotonic()
        self.counters.count(rows, seconds, traffic)

    def close(self) -> None:
        """End all links."""
        for link in self._links.values():
            link.goodbye()

    def _reopen(self) -> Agreement:
        missing = [u for u in self._urls if u not in self._links or self._links[u].closed]
        self._links |= open_all(missing, self._open)
        try:
            agreement = agree([self._links[url].greeting for url in self._urls], self.wanted)
        except BaseException:
            # What does not fit is asked again, and not kept, when the network is next used.
            for url in missing:
                self._links[url].close()
            raise
        self.links = [self._links[greeting.url] for greeting in agreement.nodes]
        names = [link.name for link in self.links]
        if names != [node.name for node in self.figures.nodes]:
            self.counters.nodes = [NodeFigures(name) for name in names]
        return agreement


def open_all(urls: Sequence[str], open_link: Callable[[str], Link]) -> dict[str, Link]:
    """Open links to all of `urls` at once. If one fails the others are closed, and it is raised.

    An interrupt closes them too.
    """
    futures: dict[str, Future[Link]] = {}
    try:
        with ThreadPoolExecutor(max(1, len(urls))) as pool:
            for url in urls:
                futures[url] = pool.submit(open_link, url)
            return {url: future.result() for url, future in futures.items()}
    except BaseException:
        # A second interrupt leaves some that are not open yet.
        for future in futures.values():
            future.add_done_callback(_close)
        raise


def _close(future: Future[Link]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().close()

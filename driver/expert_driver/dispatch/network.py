"""The nodes of one driver: links to all that answer, checked together, and who is away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import monotonic

import numpy as np

from expert_driver.dispatch.agreement import Agreement, Greeting, Wanted, agree, latest
from expert_driver.dispatch.epochs import Ask, Epochs, regreeted
from expert_driver.dispatch.exchange import Exchange
from expert_driver.dispatch.failover import lost, take_over
from expert_driver.dispatch.gathering import Call, Job, parts
from expert_driver.dispatch.links import Link
from expert_driver.dispatch.prober import Prober
from expert_driver.figures import DispatchTimes, NetworkFigures, NodeFigures
from expert_network.errors import (
    ExpertNetworkError,
    NetworkMismatch,
    NodeClosed,
    NodeError,
    NodeRefused,
    NodeTimeout,
    NodeUnreachable,
)
from expert_protocol.dtypes import WireDType
from expert_protocol.frames import ErrorCode, ReplyMode
from expert_roster.rendezvous import owner_order

LOOK_S = 0.5  # unused for so long, a link is looked at before it is used
#: With what a node refuses a link that will be welcome another time; over HTTP it is a 503.
NOT_NOW = (503, ErrorCode.DRAINING, ErrorCode.BUSY)
PING_S = 20.0  # unused for so long, its node is asked whether it is there


#: Gives a node, by its address, blocks of a layer; whether it has all of them now.
Push = Callable[[str, int, Sequence[int]], bool]


class Network:
    """Links to all nodes that answer, in the order of their roster. Used by one thread.

    `ready` is to be called before every use: it opens what is closed again, with all checks, and
    sees which nodes are away and whether there is a new roster. `observer` is told of every
    dispatch that all nodes have replied to, `notice` gets a sentence when a node goes or comes
    back. hedge: whether a row that is late is asked of replicas too. ask: how nodes are asked for
    their roster; without it the roster stays as it was. push: for blocks that
    no node has.
    """

    def __init__(
        self,
        urls: Sequence[str],
        wanted: Wanted,
        open_link: Callable[[str], Link],
        notice: Callable[[str], None] = lambda sentence: None,
        hedge: bool = False,
        ask: Ask = lambda urls: (),
        push: Push | None = None,
    ) -> None:
        self._push = push
        self._urls, self.wanted, self._open = tuple(urls), wanted, open_link
        self._epochs = Epochs(ask)
        #: To nodes that are not in the roster any more, until they owe nothing.
        self._leaving: list[Link] = []
        self._notice = notice
        self._links: dict[str, Link] = {}
        #: Why nodes are away, by their addresses.
        self._away: dict[str, NodeError] = {}
        self._prober = Prober(open_link)
        #: Whether a block was not to be had while a node was away: then it is asked once more.
        self._stuck = False
        self._used = monotonic()
        self.links: list[Link] = []
        self.exchange = Exchange()
        self.exchange.reroute, self.exchange.nowhere = self._reroute, self._nowhere
        self.exchange.rivals = self._rivals if hedge else None
        self.observer: Callable[[DispatchTimes], None] | None = None
        mode = "exact" if wanted.exact else "sum"
        #: What `figures` gives once all is counted; all nodes that were ever linked.
        self.counters = NetworkFigures(mode, wanted.wire.label, len(wanted.shape), [])
        #: Those of `links`, one by one.
        self.figures_of_links: list[NodeFigures] = []
        self.agreement: Agreement = self._reopen()

    def ready(self) -> Agreement:
        """See that every link is open but those of nodes that are away.

        Raises NodeError, KeyRefused or NetworkMismatch.
        """
        unused = monotonic() - self._used
        if unused > LOOK_S:
            self.exchange.settle()
            for link in self.links:
                if not link.owed:
                    link.check(ping=unused > PING_S)
            self.exchange.lost |= any(link.closed for link in self.links)
            self.exchange.read = True
        flip = False
        if self.exchange.read:
            flip = self._epochs.begun(self.links, self.agreement.roster.epoch)
            # Nodes that were asked in vain are asked again, whoever reads the replies.
            self.exchange.read = any(
                link.connection.epoch > self.agreement.roster.epoch for link in self.links
            )
        if flip or self.exchange.lost or self._prober.back:
            self.exchange.settle()
            if flip:
                self._flip()
            self.agreement = self._reopen()
            self.exchange.lost = False
        if self._leaving:
            self._let_go()
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
        if rows == 1:
            self.exchange.pace.saw(seconds)

    def close(self) -> None:
        """End all links."""
        self._prober.close()
        for link in (*self._links.values(), *self._leaving):
            link.goodbye()

    def _flip(self) -> None:
        """Take up the latest roster: links to its nodes, and to no others once they owe nothing."""
        news = self._epochs.news([link.greeting.url for link in self.links if not link.closed])
        if news is None or news.roster.epoch <= self.agreement.roster.epoch:
            return
        known = {link.name: url for url, link in self._links.items()}
        here = {name: known.get(name) or news.addresses.get(name) for name in news.roster.names}
        self._urls = tuple(url for url in here.values() if url is not None)
        for url, link in list(self._links.items()):
            if url in self._urls:
                link.greeting = regreeted(link.greeting, news.roster)
            else:
                self._leaving.append(self._links.pop(url))
        self._away = {url: error for url, error in self._away.items() if url in self._urls}

    def _let_go(self) -> None:
        """End the links to nodes that have left and owe nothing."""
        for link in [link for link in self._leaving if not (link.owed or link.waiting)]:
            self._leaving.remove(link)
            link.goodbye()

    def _meet(self) -> None:
        """Open links to nodes of the roster that were not named."""
        greetings = self._greetings()
        roster = latest(greetings)
        met = {link.name for link in self._links.values()}
        if not roster.epoch or met >= set(roster.names):
            return
        news = self._epochs.news([greeting.url for greeting in greetings])
        addresses = {} if news is None else news.addresses
        more = [addresses[n] for n in roster.names if n not in met and n in addresses]
        urls = [url for url in more if url not in self._urls]
        self._urls = (*self._urls, *urls)
        opened, failures = open_all(urls, self._open)
        self._links |= opened
        for url, error in failures.items():
            self._leave(url, error)

    def _reopen(self) -> Agreement:
        """Links to all that answer.

        A node that failed in use is away until it answers again. It is tried at once where nobody
        else owns its blocks, unless it was silent: that takes the time of one more silence.
        """
        self._take_back()
        failed = {
            url: link.failed
            for url, link in self._links.items()
            if link.failed and link.closed and url not in self._away
        }
        covered = bool(failed) and self._covered()
        for url, error in failed.items():
            if covered or isinstance(error, NodeTimeout):
                self._leave(url, error)
        if self._stuck or len(self._away) == len(self._urls):
            self._away.clear()  # there is nothing to do but to ask them
            self._stuck = False
        missing = [url for url in self._urls if url not in self._away and not self._is_open(url)]
        opened, failures = open_all(missing, self._open)
        self._links |= opened
        greetings = self._greetings()
        if failures and not greetings:
            raise next(iter(failures.values()))
        for url, error in failures.items():
            self._leave(url, failed.get(url) or error)
        self._meet()
        greetings = self._greetings()
        try:
            agreement = agree(greetings, self.wanted, len(self._away))
        except BaseException:
            # What does not fit is asked again, and not kept, when the network is next used.
            for url in opened:
                self._links[url].close()
            raise
        self.links = [self._links[greeting.url] for greeting in agreement.nodes]
        self._count_apart()
        return agreement

    def _greetings(self) -> list[Greeting]:
        return [self._links[url].greeting for url in self._urls if self._is_open(url)]

    def _covered(self) -> bool:
        """Whether each block has an owner among the nodes that are linked."""
        greetings = self._greetings()
        return bool(greetings) and not agree(greetings, self.wanted, len(self._urls)).adopted

    def _is_open(self, url: str) -> bool:
        return url in self._links and not self._links[url].closed

    def _take_back(self) -> None:
        """Use the links of nodes that are back, if they still fit the others."""
        while self._prober.back:
            url, link = self._prober.back.popleft()
            if url not in self._away:
                link.close()  # it was opened by others meanwhile
                continue
            try:
                agree([*self._greetings(), link.greeting], self.wanted, len(self._urls))
            except NetworkMismatch as error:
                link.close()
                self._notice(f"{error} It is left out.")
                self._prober.watch(url)
                continue
            self._links[url] = link
            del self._away[url]
            self._notice(f"node {link.name} is back.")

    def _leave(self, url: str, error: ExpertNetworkError) -> None:
        known = self._links.get(url)
        name = known.name if known else url
        problem = error.problem if isinstance(error, NodeError) else str(error)
        self._away[url] = NodeClosed(name, problem, "see whether it and its network are up")
        self._prober.watch(url)
        self._notice(f"node {name} {problem}; others compute its experts until it is back.")

    def _count_apart(self) -> None:
        """Counters for each of the links, and for those that were there before."""
        known = {figures.name: figures for figures in self.counters.nodes}
        names = [link.name for link in self.links]
        self.figures_of_links = [known.get(name) or NodeFigures(name) for name in names]
        roster = self.links[0].greeting.roster.names
        away = [known[name] for name in known if name in roster and name not in names]
        self.counters.nodes = [*self.figures_of_links, *away]

    def _reroute(self, job: Job, error: ExpertNetworkError) -> Sequence[Job]:
        """Ask the next owners of what `job` has not answered.

        A node that finds a block nowhere is asked once more if we have it.
        """
        assert job.gathering is not None
        if self._supplied(job, error):
            again = Job(job.link, job.call, job.dtype, job.unanswered, job.figures, job.adopt)
            again.cause, again.supplied = job.cause or self._absent(job), True
            return [again]
        job.gathering.given_up.add(job.link.name)
        jobs = self._instead(job, job.gathering.given_up)
        for other in jobs:
            other.cause = job.cause or error
        self.counters.failovers += bool(jobs)
        return jobs

    def _supplied(self, job: Job, error: ExpertNetworkError) -> bool:
        """Whether a node that lacks blocks has got them from us just now."""
        if not (isinstance(error, NodeRefused) and error.code == ErrorCode.NO_BLOCK):
            return False
        if job.supplied or self._push is None:
            return False
        experts = np.unique(np.concatenate([share.ids for share in job.unanswered])).tolist()
        return self._push(job.link.greeting.url, job.call.layer, experts)

    def _rivals(self, job: Job) -> Sequence[Job]:
        """Ask the next owners of what is late, if others own all of it."""
        assert job.gathering is not None
        jobs = self._instead(job, job.gathering.given_up | {job.link.name})
        if any(other.adopt for other in jobs):
            return ()
        self.counters.hedges += bool(jobs)
        return jobs

    def _instead(self, job: Job, given_up: set[str]) -> list[Job]:
        """Jobs for the next owners, but for those given up, of what `job` has not answered."""
        call = job.call
        able = [
            (link, figures)
            for link, figures in zip(self.links, self.figures_of_links, strict=True)
            if not link.closed
            and link.name not in given_up
            and _dtype(link, call, job) in call.rows
        ]
        names = [link.name for link, _ in able]
        jobs = []
        for taken in take_over(self.agreement.roster, call.layer, job.unanswered, names):
            link, figures = able[taken.node]
            dtype = _dtype(link, call, job)
            shares = [part for share in taken.shares for part in parts(share, link, call, dtype)]
            jobs.append(Job(link, call, dtype, shares, figures, taken.adopt))
        return jobs

    def _nowhere(self, job: Job, error: ExpertNetworkError) -> ExpertNetworkError:
        """What is reported of a job that nobody answers: why its blocks' own node does not."""
        self._stuck = self.exchange.lost = True
        layer, expert = job.call.layer, int(job.unanswered[0].ids[0])
        cause = job.cause
        if cause is None and isinstance(error, NodeRefused) and error.code == ErrorCode.NO_BLOCK:
            cause = self._absent(job)
        return lost(cause, layer, expert) if isinstance(cause, NodeError) else cause or error

    def _absent(self, job: Job) -> NodeError | None:
        """Why the first node of the owner order that is away is so."""
        layer, expert = job.call.layer, int(job.unanswered[0].ids[0])
        owners = owner_order(self.agreement.roster, layer, np.array([expert]))[0]
        names = [self.agreement.roster.names[owner] for owner in owners]
        away = [found for found in self._away.values() if found.node in names]
        return min(away, key=lambda found: names.index(found.node), default=None)


def _dtype(link: Link, call: Call, job: Job) -> WireDType:
    """What a link is asked in, in place of `job`."""
    if call.mode is ReplyMode.SUM:
        return job.dtype
    return WireDType.for_compute(link.greeting.welcome.compute_dtype)


def open_all(
    urls: Sequence[str], open_link: Callable[[str], Link]
) -> tuple[dict[str, Link], dict[str, NodeError]]:
    """Open links to all of `urls` at once: those that are open, and why others are not.

    Only a node that cannot be reached, does not answer, or is starting, stopping or busy is left
    out: what else fails is raised, as an interrupt is, and closes the others.
    """
    futures: dict[str, Future[Link]] = {}
    links: dict[str, Link] = {}
    failures: dict[str, NodeError] = {}
    try:
        with ThreadPoolExecutor(max(1, len(urls))) as pool:
            for url in urls:
                futures[url] = pool.submit(open_link, url)
            for url, future in futures.items():
                try:
                    links[url] = future.result()
                except (NodeUnreachable, NodeTimeout, NodeClosed) as error:
                    failures[url] = error
                except NodeRefused as error:
                    if error.code not in NOT_NOW:
                        raise
                    failures[url] = error
            return links, failures
    except BaseException:
        # A second interrupt leaves some that are not open yet.
        for future in futures.values():
            future.add_done_callback(_close)
        raise


def _close(future: Future[Link]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().close()

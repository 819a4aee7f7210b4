"""The data plane: one thread for each link, from the socket to the experts and back.

A link's thread owns its socket and its end of the protocol. One more thread, the watch, looks at
all links once a second and says WORKING on those whose dispatch takes long.
"""

from __future__ import annotations

import logging
import select
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Condition, Thread
from time import monotonic

from expert_network.errors import (
    Cancelled,
    ExpertNetworkError,
    NodeClosed,
    NodeTimeout,
    RemoteProtocolError,
)
from expert_network.net.checksum import crc32
from expert_network.net.stream import Buffer, FrameStream
from expert_node.compute import Computer, Ids, Turns
from expert_node.holdings import Holdings
from expert_node.metrics import Counters
from expert_node.single import Single
from expert_protocol.connection import NodeConnection, NodeEvent
from expert_protocol.frames import (
    Dispatch,
    ErrorCode,
    ErrorReply,
    Goodbye,
    Hello,
    Ping,
    Reply,
    Welcome,
)

log = logging.getLogger("expert_node")


@dataclass(frozen=True)
class Limits:
    """What links may take: counts of links, and seconds."""

    #: A driver each for a house full of people; each link costs a thread.
    links: int = 64
    #: Beyond these, so many at a time are told BUSY; more do not become links.
    refusals: int = 16
    #: From the hand-over to the HELLO.
    handshake: float = 5.0
    #: Without any frame. A driver that wants the link again after that opens a new one.
    idle: float = 600.0
    #: From a frame's first bytes to its last: 64 MiB over a slow radio.
    frame: float = 60.0
    #: For a driver to take a reply: it may be busy with the replies of other nodes.
    send: float = 30.0
    #: How often a driver that waits for a reply hears of us; it gives up after five.
    working: float = 1.0
    #: For a driver to read our last words.
    linger: float = 1.0


class Links:
    """All links of one node. `hidden` gives a layer's row length, LookupError for none."""

    def __init__(
        self,
        welcome: Welcome,
        model_type: str,
        computer: Computer,
        counters: Counters,
        hidden: Callable[[int], int],
        limits: Limits | None = None,
        holdings: Holdings | None = None,
    ) -> None:
        self.welcome, self.model_type, self.computer = welcome, model_type, computer
        self.counters, self.hidden = counters, hidden
        self.limits = limits or Limits()
        self.holdings = holdings
        #: Why no link may begin or go on, once the node is draining.
        self.ending: str | None = None
        self._links: dict[Link, Future[None]] = {}
        # What is promised by `reserve` and what `_links` holds: never more than there are threads.
        self._places = 0
        # MLX keeps what it made for a thread, a thread of its own among it, when that thread ends:
        # so threads are kept too, and a driver that comes and goes gets one that was there before.
        self._threads = ThreadPoolExecutor(self.limits.links + self.limits.refusals, "link")
        self._changed = Condition()
        self._watch: Thread | None = None

    def __len__(self) -> int:
        return len(self._links)

    def traffic(self) -> tuple[int, int]:
        """(received, sent) bytes over all links since the start."""
        with self._changed:
            moved = [link.traffic for link in self._links]
            received = self.counters.bytes_received + sum(came for came, _ in moved)
            return received, self.counters.bytes_sent + sum(went for _, went in moved)

    def announce(self, welcome: Welcome) -> None:
        """Greet with `welcome` from now on, and carry its epoch in all replies."""
        with self._changed:
            self.welcome = welcome
            links = list(self._links)
        for link in links:
            link.announce(welcome.epoch)

    def reserve(self) -> str | None:
        """Keep a place for a link, to be used with `start` or given back with `release`.

        If there is none, the sentence that says why: no room even for a refusal, or draining.
        """
        with self._changed:
            if self.ending is not None:
                return self.ending
            if self._places >= self.limits.links + self.limits.refusals:
                return "too many links are open"
            self._places += 1
            return None

    def release(self) -> None:
        """Give back a place that `reserve` kept and no link was started in."""
        with self._changed:
            self._places -= 1

    def start(self, sock: socket.socket, peer: str) -> Future[None] | None:
        """Serve a link on `sock`, which is handed over, in a reserved place and its own thread.

        Done when the link ends. None, with the socket closed and the place given back, if the node
        has begun to drain meanwhile, or the system refuses (which is logged).
        """
        with self._changed:
            served = self._begin(sock, peer) if self.ending is None else None
            if served is None:
                sock.close()
                self._places -= 1
                return None
            self._changed.notify_all()
        self.counters.link_opened()
        return served

    def _begin(self, sock: socket.socket, peer: str) -> Future[None] | None:
        try:
            if self._watch is None:
                watch = Thread(target=self._watch_links, name="watch", daemon=True)
                watch.start()
                self._watch = watch
            link = Link(self, sock, peer, busy=len(self) >= self.limits.links)
            served = self._threads.submit(self._serve, link)
        except (OSError, RuntimeError) as error:  # a socket that is gone; no thread to be had
            log.warning("%s got no link: %s", peer, error)
            return None
        self._links[link] = served
        return served

    def wait_for_none(self, seconds: float) -> None:
        """Block until no link is open, for `seconds` at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._links, seconds)

    def drain(self, reason: str, seconds: float) -> int:
        """End all links, each after the dispatch it is computing; how many had to be cut off.

        Blocks for `seconds` at most. No link can be started afterwards.
        """
        with self._changed:
            self.ending = reason
            served = list(self._links.values())
            for link in self._links:
                link.interrupt()
        left = wait(served, seconds).not_done
        self.cut()
        self._threads.shutdown(wait=False)
        return len(left)

    def cut(self) -> int:
        """Close the links that are left at once; how many they were."""
        with self._changed:
            links = list(self._links)
        for link in links:
            link.stream.close(Cancelled("the link was cut off"))
        return len(links)

    def _serve(self, link: Link) -> None:
        with self._changed:
            if link not in self._links:
                return  # the pool keeps what it had no thread for, and `start` has let go of it
        try:
            link.run()
        finally:
            with self._changed:
                del self._links[link]
                self._places -= 1
                self.counters.link_ended(*link.traffic)
                self._changed.notify_all()

    def _watch_links(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._links))
            started = monotonic()
            with self._changed:
                # Woken by each change; the second is what counts.
                while (left := started + self.limits.working - monotonic()) > 0:
                    self._changed.wait(left)
                links = list(self._links)
            for link in links:
                link.say_working()


class Link:
    """One driver's link, from HELLO to GOODBYE."""

    def __init__(self, links: Links, sock: socket.socket, peer: str, busy: bool) -> None:
        self._links, self._limits, self._peer, self._busy = links, links.limits, peer, busy
        self._connection = NodeConnection(links.hidden, crc32)
        self.stream: FrameStream[NodeEvent] = FrameStream(
            sock, self._connection, peer, linger=self._limits.linger
        )
        #: When the dispatch at hand came; None between two.
        self._since: float | None = None
        # Around every frame that goes out: no WORKING inside of a REPLY, and none after it.
        self._sending = Turns()
        self._dispatches = 0
        #: Where its driver says that blocks may be.
        self._peers: tuple[str, ...] = ()
        self._single: Single | None = None
        if links.computer.layers and Single.there:
            self._single = Single(
                links.computer,
                self.stream,
                self._connection,
                links.hidden,
                links.welcome.max_payload,
                self._sending,
            )
        self.announce(links.welcome.epoch)

    def run(self) -> None:
        """Serve until either side ends it. Closes the socket; raises nothing."""
        log.info("%s opened a link", self._peer)
        counters, single = self._links.counters, self._single
        if single is not None:
            counters.watch(single.counts)
        try:
            self._serve()
        except Cancelled:
            pass  # the node is draining: _part says so to the driver, unless it was cut off
        except (NodeClosed, NodeTimeout) as end:
            log.info("link ended: %s", end)
        except RemoteProtocolError as error:
            self._links.counters.refused(ErrorCode(error.code))
            log.warning("%s was refused: %s", self._peer, error)
        except Exception:
            log.exception("the link from %s failed", self._peer)
        if single is not None:
            counters.forget(single.counts)
        self._part()
        log.info("%s has left, after %d dispatches", self._peer, self._dispatches)

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes received and sent."""
        received, sent = (0, 0) if self._single is None else self._single.traffic
        return self.stream.bytes_received + received, self.stream.bytes_sent + sent

    def interrupt(self) -> None:
        """End it after the dispatch at hand. Any thread."""
        if self._single is not None:
            self._single.end()
        self.stream.interrupt()

    def announce(self, epoch: int) -> None:
        """Carry the node's `epoch` in replies from now on. Any thread."""
        self._connection.epoch = epoch
        if self._single is not None:
            with self._sending:
                self._single.announce(epoch)

    def say_working(self) -> None:
        """Tell the driver that its dispatch is still computed, if it has been for a while.

        For the watch, which must never wait: not for a REPLY that is on its way, nor for a driver
        that does not read.
        """
        since = self._busy_since()
        if since is None or monotonic() - since < self._limits.working / 2:
            return
        if not self._sending.acquire(False):
            return
        try:
            if self._busy_since() is not None and _writable(self.stream.fileno()):
                self.stream.send(self._working(), self._limits.send)
        except ExpertNetworkError as error:
            log.debug("no WORKING to %s: %s", self._peer, error)  # its own thread will meet it
        finally:
            self._sending.release()

    def _busy_since(self) -> float | None:
        since = self._since
        return self._single.since if since is None and self._single else since

    def _working(self) -> Sequence[Buffer]:
        single = self._single
        return single.working() if single and single.since else self._connection.working()

    def _serve(self) -> None:
        event = self.stream.receive(self._limits.handshake)
        if not (isinstance(event, Hello) and self._greet(event)):
            return
        single = self._single
        while self._links.ending is None:
            if single is not None:
                answer = single.serve(self._links, self._limits.send)
                if answer is not None:
                    with self._sending:
                        self._answer(answer)
                    continue
                if self._links.ending is not None:
                    return
            match self._next():
                case Dispatch() as dispatch:
                    self._compute(dispatch)
                    if single is not None:
                        single.learn(dispatch)
                case Ping():
                    self._send(self._connection.pong())
                case Goodbye():
                    return
                case None:
                    log.info("%s was idle for %g s", self._peer, self._limits.idle)
                    return

    def _next(self) -> NodeEvent | None:
        """The next event; None if nothing at all has come for as long as a link may be idle."""
        received = self.stream.bytes_received
        try:
            return self.stream.receive(self._limits.idle, self._limits.frame)
        except NodeTimeout:
            if self.stream.bytes_received != received:
                raise
            return None

    def _greet(self, hello: Hello) -> bool:
        """Answer the HELLO; False if with a refusal."""
        refusal = self._refusal(hello)
        if refusal is None:
            self._peers = hello.peers
            self._send(self._connection.welcome(self._links.welcome))
            return True
        self._links.counters.refused(refusal.code)
        log.warning("%s was refused: %s", self._peer, refusal.message)
        self.stream.finish(self._connection.error(refusal.code, refusal.message))
        return False

    def _refusal(self, hello: Hello) -> ErrorReply | None:
        links, ours = self._links, self._links.welcome
        if hello.protocol != ours.protocol:
            message = (
                f"node {ours.node} speaks protocol version {ours.protocol} and this driver version "
                f"{hello.protocol}; install the same version of expert-network on both"
            )
            return ErrorReply(ErrorCode.VERSION, message)
        if hello.model_digest != ours.model_digest:
            message = (
                f"node {ours.node} serves the {links.model_type} model {_short(ours.model_digest)} "
                f"and this driver has model {_short(hello.model_digest)}; give both the same store"
            )
            return ErrorReply(ErrorCode.MODEL, message)
        if links.ending is not None:
            return ErrorReply(ErrorCode.DRAINING, links.ending)
        if self._busy:
            message = f"node {ours.node} has {self._limits.links} links, the most it takes"
            return ErrorReply(ErrorCode.BUSY, message)
        return None

    def _compute(self, dispatch: Dispatch) -> None:
        self._since = monotonic()
        answer = self._links.computer.answer(dispatch, self._take)
        self._dispatches += 1
        with self._sending:
            self._since = None
            self._answer(answer)

    def _take(self, layer: int, experts: Ids) -> str | None:
        """See Take: from the disk, else from the peers that this driver names."""
        holdings = self._links.holdings
        return "it adopts none" if holdings is None else holdings.adopt(layer, experts, self._peers)

    def _answer(self, answer: Reply | ErrorReply) -> None:
        if isinstance(answer, Reply):
            frame = self._connection.reply(answer)
        else:
            self._links.counters.refused(answer.code)
            log.warning("a dispatch of %s was refused: %s", self._peer, answer.message)
            frame = self._connection.error(answer.code, answer.message)
        self.stream.send(frame, self._limits.send)

    def _send(self, frame: Sequence[Buffer]) -> None:
        with self._sending:
            self.stream.send(frame, self._limits.send)

    def _part(self) -> None:
        """Close the socket, with a GOODBYE if it is the node that leaves."""
        ending = self._links.ending
        if ending is None or self.stream.closed or self._connection.closed:
            self.stream.finish()
        else:
            self.stream.finish(self._connection.goodbye(ending))


def _writable(descriptor: int) -> bool:
    """Whether a small frame can be sent without waiting. -1: closed."""
    if descriptor < 0:
        return False
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(0))


def _short(digest: str) -> str:
    return digest[:12]

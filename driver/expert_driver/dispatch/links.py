"""One link: a node's socket, its end of the protocol, and every failure as a NodeError."""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

from expert_driver.dispatch.agreement import Greeting
from expert_driver.dispatch.routing import Share
from expert_network.errors import (
    ExpertNetworkError,
    NetworkMismatch,
    NodeClosed,
    NodeError,
    NodeRefused,
    NotANode,
    RemoteProtocolError,
)
from expert_network.net.auth import ClusterKey
from expert_network.net.checksum import crc32
from expert_network.net.stream import FrameStream, open_link
from expert_protocol.connection import DriverConnection, DriverEvent
from expert_protocol.frames import (
    Dispatch,
    ErrorCode,
    ErrorReply,
    Goodbye,
    Hello,
    Pong,
    Reply,
    Welcome,
)

if TYPE_CHECKING:
    from expert_driver.dispatch.gathering import Job

CONNECT_S = 5.0  # for TCP, the Upgrade, the key's round and the WELCOME together
PONG_S = 2.0  # for a node to answer a PING while nothing is asked of it

_ADVICE = {
    ErrorCode.VERSION: "install the same expert-network on both",
    ErrorCode.MODEL: (
        "start it with this driver's store, or leave STORE out to fetch the one it has"
    ),
    ErrorCode.KEY: "give the node's own key with --key-file",
    ErrorCode.ROSTER: "start all nodes with the same --roster",
    ErrorCode.NUMERICS: "leave --exact out, or use nodes of one kind",
    ErrorCode.BUSY: "wait until it has room, or stop another driver",
    ErrorCode.DRAINING: "wait until it is back",
    ErrorCode.BAD_VALUES: "try --wire f32; if that is refused too, verify the store",
    ErrorCode.NOT_OWNED: "start the driver again, so that it learns the node's roster",
    ErrorCode.NO_BLOCK: "start a node that holds it",
}
_MISMATCHES = (ErrorCode.VERSION, ErrorCode.MODEL, ErrorCode.ROSTER, ErrorCode.NUMERICS)


@dataclass(frozen=True)
class Opener:
    """How links are opened. `hidden` gives a layer's row length."""

    key: ClusterKey | None
    hello: Hello
    hidden: Callable[[int], int]
    timeout_s: float = CONNECT_S

    def open(self, url: str) -> Link:
        """Connect and greet, within `timeout_s`. Raises NodeError, KeyRefused, NetworkMismatch."""
        deadline = monotonic() + self.timeout_s
        sock = open_link(url, self.key, self.timeout_s)
        connection = DriverConnection(self.hidden, crc32)
        stream: FrameStream[DriverEvent] = FrameStream(sock, connection, url)
        try:
            with _explained(url):
                stream.send(connection.hello(self.hello), max(0.0, deadline - monotonic()))
                event = stream.receive(max(0.0, deadline - monotonic()))
            if isinstance(event, ErrorReply):
                raise link_refusal(url, event)
            if not isinstance(event, Welcome):
                raise NodeClosed(url, "ended the link before greeting", "look at its log")
        except BaseException:
            stream.close()
            raise
        stream.peer = event.node
        return Link(stream, connection, Greeting(url, event))


class Link:
    """An open link that has been greeted, and the queue of what is asked on it.

    After a NodeError it is closed, but for the refusal of one dispatch. owed: what the node has not
    answered, the oldest first, each with its size in bytes; waiting: what has not been sent. since:
    when, by monotonic(), the oldest began to be the oldest.
    """

    def __init__(
        self, stream: FrameStream[DriverEvent], connection: DriverConnection, greeting: Greeting
    ) -> None:
        self.stream, self.connection, self.greeting = stream, connection, greeting
        self.name, self.descriptor = greeting.name, stream.fileno()
        self.owed: deque[tuple[Job, Share, int]] = deque()
        self.waiting: deque[tuple[Job, Share]] = deque()
        self.since = 0.0
        #: Why it ended, if that was while something was owed on it.
        self.failed: ExpertNetworkError | None = None
        #: Bytes of the frames that were taken up to the last reply.
        self.taken = stream.bytes_taken

    @property
    def closed(self) -> bool:
        return self.stream.closed

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received since it was opened, counted at the socket."""
        return self.stream.bytes_sent, self.stream.bytes_received

    def push(self, dispatch: Dispatch) -> int:
        """Send it, as far as that goes without waiting; its size in bytes. Raises NodeClosed."""
        return self.stream.push(self.connection.dispatch(dispatch))

    def next(self) -> DriverEvent | None:
        """The next event of what `stream` has pulled; its arrays hold until the next call.

        Raises NodeClosed, for a GOODBYE as well, NodeRefused or NotANode.
        """
        try:
            event = self.stream.next()
        except RemoteProtocolError as error:
            raise not_the_protocol(self.name, error) from error
        if type(event) is not Reply and event is not None:
            self._meet(event)
        return event

    def _meet(self, event: DriverEvent) -> None:
        """Raise what an event means that is no answer."""
        if self.connection.closed:
            self.close()
        if isinstance(event, Goodbye):
            reason = event.reason.removeprefix(f"node {self.name} ")
            raise NodeClosed(self.name, f"ended the link ({reason})", "start it again")
        if isinstance(event, ErrorReply):
            raise refusal(self.name, event)

    def check(self, ping: bool) -> None:
        """Close the link if the node has ended it, or (`ping`) if it does not answer."""
        if self.closed:
            return
        try:
            if not self.stream.idle or _readable(self.descriptor):
                # Nothing is outstanding: whatever came, a GOODBYE or the end, means no more links.
                self.close()
            elif ping:
                self.stream.send(self.connection.ping(), PONG_S)
                if not isinstance(self.stream.receive(PONG_S), Pong):
                    self.close()
        except ExpertNetworkError:
            self.close()

    def close(self) -> None:
        """End it at once; closing again does nothing."""
        self.stream.close()

    def goodbye(self) -> None:
        """End it and say so, if that can still be said."""
        if not self.closed and not self.connection.closed:
            self.stream.finish(self.connection.goodbye("the driver is done"), PONG_S)
        self.close()


def _readable(descriptor: int) -> bool:
    poll = select.poll()  # select() takes no descriptor above 1023
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


@contextmanager
def _explained(node: str) -> Iterator[None]:
    """What is not the protocol, as an error that names the node."""
    try:
        yield
    except RemoteProtocolError as error:
        raise not_the_protocol(node, error) from error


def link_refusal(url: str, error: ErrorReply) -> NodeRefused | NetworkMismatch:
    """What an ERROR frame in answer to the HELLO means."""
    if error.code not in _MISMATCHES:
        return refusal(url, error)
    problem, advice = _problem_and_advice(url, error)
    return NetworkMismatch(f"node {url} refuses the link: {problem}; {advice}.")


def refusal(node: str, error: ErrorReply) -> NodeRefused:
    """What an ERROR frame on a greeted link means: this node failed, whatever its code says."""
    problem, advice = _problem_and_advice(node, error)
    return NodeRefused(node, f"refuses: {problem}", advice, error.code)


def _problem_and_advice(node: str, error: ErrorReply) -> tuple[str, str]:
    """A node may say itself what to do, after a semicolon."""
    message = error.message.rstrip(". ").removeprefix(f"node {node} ")
    problem, _, advice = message.rpartition("; ")
    if not problem:
        return advice, _ADVICE.get(error.code, "look at its log")
    return problem, advice


def not_the_protocol(node: str, error: RemoteProtocolError) -> NodeError:
    """What came was no frame that may come now: another program, or a damaged stream."""
    if error.code == ErrorCode.VERSION:
        return NodeRefused(node, f"differs: {error}", _ADVICE[ErrorCode.VERSION], error.code)
    return NotANode(node, f"sends what is not the protocol ({error})", "see what listens there")

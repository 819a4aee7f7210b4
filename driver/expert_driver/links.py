"""One link: a node's socket, its end of the protocol, and every failure as a NodeError."""

from __future__ import annotations

import select
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from expert_network.net.auth import ClusterKey
from expert_network.net.stream import FrameStream, open_link

from expert_driver.agreement import Greeting
from expert_network.errors import (
    NetworkMismatch,
    NodeClosed,
    NodeError,
    NodeRefused,
    NotANode,
    RemoteProtocolError,
)
from expert_protocol.connection import DriverConnection, DriverEvent
from expert_protocol.frames import Dispatch, ErrorCode, ErrorReply, Goodbye, Hello, Pong, Welcome

CONNECT_S = 5.0  # for TCP, the Upgrade, the key's round and the WELCOME, each
PONG_S = 2.0  # for a node to answer a PING while nothing is asked of it

T = TypeVar("T")

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
        """Connect and greet. Raises NodeError, KeyRefused or NetworkMismatch."""
        sock = open_link(url, self.key, self.timeout_s)
        connection = DriverConnection(self.hidden)
        stream = FrameStream(sock, connection, url)
        try:
            stream.send(connection.hello(self.hello))
            event = stream.receive(self.timeout_s)
            if isinstance(event, ErrorReply):
                raise refusal(url, event)
            if not isinstance(event, Welcome):
                raise NodeClosed(url, "ended the link before greeting", "look at its log")
        except RemoteProtocolError as error:
            stream.close()
            raise not_the_protocol(url, error) from error
        except BaseException:
            stream.close()
            raise
        return Link(stream, connection, Greeting(url, event))


class Link:
    """An open link that has been greeted. Has at most one dispatch outstanding."""

    def __init__(
        self, stream: FrameStream, connection: DriverConnection, greeting: Greeting
    ) -> None:
        self.stream, self._connection, self.greeting = stream, connection, greeting
        self.closed = False

    @property
    def name(self) -> str:
        return self.greeting.name

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received since it was opened, counted at the socket."""
        return self.stream.bytes_sent, self.stream.bytes_received

    def fileno(self) -> int:
        return self.stream.fileno()

    def dispatch(self, dispatch: Dispatch, timeout_s: float) -> None:
        """Send it. Raises NodeClosed, or NodeTimeout if the node takes no bytes for so long."""
        self._guard(lambda: self.stream.send(self._connection.dispatch(dispatch), timeout_s))

    def receive(self, timeout_s: float) -> DriverEvent:
        """The next event. Raises NodeTimeout, NodeClosed (a GOODBYE as well) or NodeRefused.

        After a refusal of one dispatch the link is still usable; after the others it is closed.
        """
        event = self._guard(lambda: self.stream.receive(timeout_s))
        if isinstance(event, Goodbye):
            self.close()
            raise NodeClosed(self.name, f"ended the link: {event.reason}", "start it again")
        if isinstance(event, ErrorReply):
            if self._connection.closed:
                self.close()
            raise refusal(self.name, event)
        return event

    def check(self, ping: bool) -> None:
        """Close the link if the node has ended it, or (`ping`) if it does not answer."""
        try:
            if select.select([self], [], [], 0)[0]:
                # Nothing is outstanding: whatever came, a GOODBYE or the end, means no more links.
                self.close()
            elif ping:
                self._guard(lambda: self.stream.send(self._connection.ping(), PONG_S))
                if not isinstance(self.receive(PONG_S), Pong):
                    self.close()
        except NodeError:
            self.close()

    def close(self) -> None:
        """End it at once; closing again does nothing."""
        self.closed = True
        self.stream.close()

    def goodbye(self) -> None:
        """End it and say so, if that can still be said."""
        if not self.closed and not self._connection.closed:
            with suppress(NodeError):
                self.stream.send(self._connection.goodbye("the driver is done"), PONG_S)
        self.close()

    def _guard(self, act: Callable[[], T]) -> T:
        """Whatever breaks off inside a frame leaves nobody knowing where the next one starts."""
        try:
            return act()
        except RemoteProtocolError as error:
            self.close()
            raise not_the_protocol(self.name, error) from error
        except BaseException:
            self.close()
            raise


def refusal(node: str, error: ErrorReply) -> NodeRefused | NetworkMismatch:
    """What a node's ERROR frame means here."""
    advice = _ADVICE.get(error.code, "look at its log")
    message = error.message.rstrip(". ")
    if error.code in _MISMATCHES:
        return NetworkMismatch(f"node {node} refuses the link: {message}; {advice}.")
    return NodeRefused(node, f"refuses: {message}", advice, error.code)


def not_the_protocol(node: str, error: RemoteProtocolError) -> NodeError:
    """What came was no frame that may come now: another program, or a damaged stream."""
    if error.code == ErrorCode.VERSION:
        return NodeRefused(node, f"differs: {error}", _ADVICE[ErrorCode.VERSION], error.code)
    return NotANode(node, f"sends what is not the protocol ({error})", "see what listens there")

"""Nodes that do as they are told, behind real sockets: each test names the one fault it needs."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from threading import Thread
from typing import Any

import numpy as np

from expert_network.errors import ExpertNetworkError
from expert_network.net.stream import FrameStream
from expert_protocol.connection import NodeConnection, NodeEvent
from expert_protocol.dtypes import WireDType
from expert_protocol.frames import Dispatch, ErrorCode, Hello, Ping, Reply, ReplyMode, Welcome
from expert_protocol.header import VERSION
from expert_roster.roster import Roster

DIGEST = "a" * 64
HIDDEN = 4
SWITCH = (
    b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: expert-link/1\r\n\r\n"
)


class FakeLink:
    """The node's end of one link."""

    def __init__(self, node: FakeNode, sock: socket.socket) -> None:
        self.node, self.sock = node, sock
        self.connection = NodeConnection(lambda layer: HIDDEN)
        self.stream: FrameStream[NodeEvent] = FrameStream(sock, self.connection, "driver")

    def run(self) -> None:
        with suppress(ExpertNetworkError, OSError):
            while not self.connection.closed and not self.stream.closed:
                self.on(self.stream.receive(60.0))
        self.stream.close()

    def on(self, event: NodeEvent) -> None:
        match event:
            case Hello():
                self.node.hellos.append(event)
                self.node.greet(self)
            case Ping():
                self.node.pings += 1
                self.stream.send(self.connection.pong())
            case Dispatch():
                if event.adopt and not self.node.adopts:
                    refused = f"node {self.node.welcome.node} has no such block; add a node"
                    self.stream.send(self.connection.error(ErrorCode.NO_BLOCK, refused))
                    return
                self.node.dispatches.append(kept(event))
                self.node.behave(self, event)

    def reset(self) -> None:
        """End the connection with a TCP reset."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


class FakeNode:
    """A node called `name` of the roster a,b,c (or another) whose expert e makes (e + 1) * row.

    `behave` is what it does with a dispatch and `greet` with a HELLO; both can be replaced at any
    time. Everything it was asked is kept.
    """

    def __init__(self, name: str, roster: str = "a,b", **welcome: Any) -> None:
        whole = Roster.parse(roster)
        fields: dict[str, Any] = {
            "protocol": VERSION,
            "node": name,
            "model_digest": DIGEST,
            "roster": whole.to_wire(),
            "roster_digest": whole.digest,
            "epoch": 0,
            "numerics": "fake",
            "compute_dtype": "float32",
            "dtypes": tuple(WireDType),
        }
        self.welcome = Welcome(**fields | welcome)
        self.behave: Callable[[FakeLink, Dispatch], None] = answer
        self.greet: Callable[[FakeLink], None] = welcomed
        #: Whether it can get the blocks of others.
        self.adopts = False
        self.hellos: list[Hello] = []
        self.dispatches: list[Dispatch] = []
        self.pings = 0
        self.links: list[FakeLink] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += sock.recv(1)
        sock.sendall(SWITCH)
        link = FakeLink(self, sock)
        self.links.append(link)
        link.run()

    def stop(self) -> None:
        """End every link and listen no more. Stopping again does nothing."""
        if self._listener.fileno() < 0:
            return
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in self.links:
            link.stream.close()


def welcomed(link: FakeLink) -> None:
    """Greet as a node should."""
    link.stream.send(link.connection.welcome(link.node.welcome))


def answer(link: FakeLink, dispatch: Dispatch) -> None:
    """Compute and reply as a node should."""
    link.stream.send(link.connection.reply(computed(dispatch)))


def computed(dispatch: Dispatch) -> Reply:
    rows = dispatch.dtype.decode(dispatch.rows)
    offsets = dispatch.offsets.astype(np.intp)
    outputs = np.repeat(rows, offsets[1:] - offsets[:-1], axis=0) * (
        dispatch.ids[:, None].astype(np.float32) + 1
    )
    if dispatch.mode is ReplyMode.SUM:
        weighted = outputs * dispatch.weights[:, None]
        outputs = np.add.reduceat(weighted, offsets[:-1], axis=0)
    return Reply(dispatch.mode, dispatch.dtype, 3, 50, dispatch.dtype.encode(outputs))


def kept(dispatch: Dispatch) -> Dispatch:
    """A copy that outlives the stream's buffer."""
    return replace(
        dispatch,
        rows=dispatch.rows.copy(),
        offsets=dispatch.offsets.copy(),
        ids=dispatch.ids.copy(),
        weights=dispatch.weights.copy(),
    )

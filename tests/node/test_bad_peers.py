"""What strangers, broken drivers and scanners send to a live node, which serves on."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection
from time import monotonic
from zlib import crc32

import numpy as np
import pytest

from expert_network.errors import NodeRefused
from expert_network.net.stream import FrameStream, open_link
from expert_network.store.reader import Store
from expert_node.handover import UPGRADE
from expert_protocol.connection import DriverConnection, DriverEvent
from expert_protocol.frames import Dispatch, ErrorCode, ErrorReply, Reply, Welcome
from expert_protocol.header import VERSION, Kind, encode_frame
from expert_roster.rendezvous import partition
from expert_roster.roster import Roster
from tests.support.links import DriverLink, dispatch_of, hello_for, linked, raw_link
from tests.support.nodes import NodeProcess
from tests.support.servers import read_head


def own(store: Store) -> list[int]:
    """The experts of layer 0 that node a of a,b holds."""
    return list(map(int, partition(Roster.parse("a,b"), "a", store.manifest.shape)[0]))


def good(store: Store) -> Dispatch:
    """A dispatch that node a answers."""
    rows = np.ones((1, store.manifest.layer(0).hidden), np.float32)
    return dispatch_of(0, rows, [own(store)[:1]])


@contextmanager
def unharmed(node: NodeProcess, store: Store) -> Iterator[None]:
    """A good driver is answered before and after, on the same link, and by a new one."""
    with linked(node.url, store.manifest) as link:
        assert isinstance(link.ask(good(store)), Reply)
        yield
        assert isinstance(link.ask(good(store)), Reply)
    with linked(node.url, store.manifest) as link:
        assert isinstance(link.ask(good(store)), Reply)
    assert "Traceback" not in node.stderr()


def header(**fields: int) -> bytes:
    """A DISPATCH header with a right checksum and these fields changed."""
    values = {
        "magic": 0x4E505845,
        "version": VERSION,
        "kind": 3,
        "sequence": 1,
        "rows": 1,
        "length": 0,
    }
    values |= fields
    data = (
        values["magic"].to_bytes(4, "little")
        + bytes([values["version"], values["kind"], 0, 0])
        + values["sequence"].to_bytes(4, "little")
        + bytes(8)
        + values["rows"].to_bytes(2, "little")
        + bytes(2)
        + values["length"].to_bytes(4, "little")
    )
    return data + crc32(data).to_bytes(4, "little")


NONSENSE = [
    pytest.param(header(magic=0x20544547), ErrorCode.PROTOCOL, "GET", id="magic"),
    pytest.param(header(version=4), ErrorCode.VERSION, "version 4", id="version"),
    pytest.param(header(kind=99), ErrorCode.PROTOCOL, "kind 99", id="kind"),
    pytest.param(header(length=2**32 - 1), ErrorCode.TOO_LARGE, "4294967295", id="length"),
    pytest.param(header(rows=60000, length=64), ErrorCode.TOO_LARGE, "60000 rows", id="rows"),
    pytest.param(header(length=64), ErrorCode.PROTOCOL, "cannot hold", id="size"),
    pytest.param(header(sequence=7, length=64), ErrorCode.PROTOCOL, "sequence 7", id="sequence"),
]


@pytest.mark.parametrize(("frame", "code", "words"), NONSENSE)
def test_nonsense_after_the_greeting(
    node: NodeProcess, store: Store, frame: bytes, code: ErrorCode, words: str
) -> None:
    """A frame that cannot be is answered with ERROR, and its link, no other, is closed."""
    with unharmed(node, store), linked(node.url, store.manifest) as link:
        # Our own end has to be owed an answer to take one.
        link.connection.dispatch(good(store))
        link.send([frame])
        answer = link.receive()
        assert isinstance(answer, ErrorReply)
        assert answer.code is code
        if code is not ErrorCode.PROTOCOL or words != "GET":
            assert words in answer.message


@pytest.mark.parametrize(
    "frame",
    [header(magic=0), header(kind=Kind.WELCOME), b"\x00" * 32, b"\xff" * 4096, header()],
)
def test_nonsense_for_a_greeting(node: NodeProcess, store: Store, frame: bytes) -> None:
    """What comes in place of a HELLO is answered with ERROR and closed."""
    with unharmed(node, store), raw_link(node.url, store.manifest) as link:
        link.connection.hello(hello_for(store.digest))
        link.send([frame])
        answer = link.receive()
        assert isinstance(answer, ErrorReply)
        assert answer.code in (ErrorCode.PROTOCOL, ErrorCode.VERSION)


def test_a_greeting_that_is_not_msgpack(node: NodeProcess, store: Store) -> None:
    """A HELLO whose payload is nonsense is refused."""
    with unharmed(node, store), raw_link(node.url, store.manifest) as link:
        link.connection.hello(hello_for(store.digest))
        link.send(encode_frame(Kind.HELLO, [b"\xc1" * 100]))
        answer = link.receive()
        assert isinstance(answer, ErrorReply)
        assert "HELLO is not understood" in answer.message


def corrupted(buffers: Sequence[bytes | memoryview]) -> list[bytes]:
    """The same frame with one bit of its payload changed on the way."""
    data = bytearray(b"".join(buffers))
    data[40] ^= 1
    return [bytes(data)]


def test_a_bit_flipped_on_the_way(node: NodeProcess, store: Store) -> None:
    """A frame whose checksum is wrong is not computed."""
    with unharmed(node, store), linked(node.url, store.manifest) as link:
        link.send(corrupted(link.connection.dispatch(good(store))))
        answer = link.receive()
        assert isinstance(answer, ErrorReply)
        assert "checksum" in answer.message


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite(node: NodeProcess, store: Store, value: float) -> None:
    """NaN activations are refused, and the same link is served on."""
    rows = np.full((1, store.manifest.layer(0).hidden), value, np.float32)
    with unharmed(node, store), linked(node.url, store.manifest) as link:
        answer = link.ask(dispatch_of(0, rows, [own(store)[:1]]))
        assert isinstance(answer, ErrorReply)
        assert answer.code is ErrorCode.BAD_VALUES
        assert isinstance(link.ask(good(store)), Reply)


def test_another_model(node: NodeProcess, store: Store) -> None:
    """A driver with another model is told both digests."""
    with unharmed(node, store), raw_link(node.url, store.manifest) as link:
        answer = link.greet("ab" * 32)
        assert isinstance(answer, ErrorReply)
        assert answer.code is ErrorCode.MODEL
        assert "abababababab" in answer.message and store.digest[:12] in answer.message


def test_a_driver_that_vanishes_in_the_middle_of_a_frame(node: NodeProcess, store: Store) -> None:
    """Half a frame and a reset cost the node one link and nothing else."""
    with unharmed(node, store), linked(node.url, store.manifest) as link:
        frame = b"".join(link.connection.dispatch(good(store)))
        link.send([frame[: len(frame) // 2]])
        reset(link)


def test_a_driver_that_does_not_wait_for_its_reply(node: NodeProcess, store: Store) -> None:
    """A driver that asks and is gone before the answer costs nothing else."""
    with unharmed(node, store), linked(node.url, store.manifest) as link:
        link.send(link.connection.dispatch(good(store)))
        reset(link)


def reset(link: DriverLink) -> None:
    """Close the link's socket with a reset."""
    sock = socket.socket(fileno=link.stream.fileno())
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    sock.detach()
    link.stream._sock.close()


# Over HTTP

ASKED = {"Connection": "Upgrade", "Upgrade": UPGRADE}


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({}, "does not ask for an Upgrade"),
        ({**ASKED, "Upgrade": "websocket"}, "asks for 'websocket'"),
        ({**ASKED, "Upgrade": "expert-link/2"}, "asks for 'expert-link/2'"),
        ({"Upgrade": UPGRADE}, f"asks for '{UPGRADE}'"),
    ],
)
def test_no_link_without_the_right_upgrade(
    node: NodeProcess, headers: dict[str, str], words: str
) -> None:
    """GET /link without our Upgrade is answered with 426, which says what is spoken here."""
    connection = HTTPConnection("127.0.0.1", node.port, timeout=20)
    with closing(connection):
        connection.request("GET", "/link", headers=headers)
        answer = connection.getresponse()
        assert (answer.status, answer.headers["Upgrade"]) == (426, UPGRADE)
        assert words in json.load(answer)["error"]


def test_frames_before_the_answer(node: NodeProcess, store: Store) -> None:
    """A HELLO sent along with the Upgrade is lost, and the link fails at the next frame."""
    lines = ["GET /link HTTP/1.1", "Host: x", *(f"{k}: {v}" for k, v in ASKED.items()), "", ""]
    manifest = store.manifest
    connection = DriverConnection(lambda layer: manifest.layer(layer).hidden)
    hello = b"".join(connection.hello(hello_for(store.digest)))
    with (
        unharmed(node, store),
        socket.create_connection(("127.0.0.1", node.port), 20) as sock,
    ):
        sock.sendall("\r\n".join(lines).encode() + hello)
        assert read_head(sock).startswith(b"HTTP/1.1 101 ")
        sock.sendall(header(length=64))
        stream = FrameStream[DriverEvent](sock, connection, "node")
        answer = stream.receive(20)
        assert isinstance(answer, ErrorReply)
        assert "DISPATCH came while the link was fresh" in answer.message


def http(node: NodeProcess, request: bytes) -> bytes:
    """All that the node answers to these bytes until it closes."""
    answer = b""
    with socket.create_connection(("127.0.0.1", node.port), 20) as sock, suppress(ConnectionError):
        sock.sendall(request)
        while more := sock.recv(65536):
            answer += more
    return answer


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        b"EXPN" + bytes(28) + b"\r\n\r\n",
        b"GET /" + b"x" * 20000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(1000)) + b"\r\n",
        b"POST /link HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n",
    ],
)
def test_not_our_http(node: NodeProcess, store: Store, request_bytes: bytes) -> None:
    """TLS, bare frames and monstrous headers are answered with a 4xx or closed."""
    with unharmed(node, store):
        answer = http(node, request_bytes)
    assert answer == b"" or b" 4" in answer.splitlines()[0]


def test_hundreds_of_links_that_say_nothing(node: NodeProcess, store: Store) -> None:
    """Beyond the links there is room for, an Upgrade is refused with 503 and a sentence."""
    with unharmed(node, store):
        sockets = []
        try:
            with pytest.raises(NodeRefused, match="too many links"):
                for _ in range(100):
                    sockets.append(open_link(node.url, None, 20))
        finally:
            for sock in sockets:
                sock.close()
        assert len(sockets) > 64
        wait_for_room(node, store)


def wait_for_room(node: NodeProcess, store: Store) -> None:
    """Ask until the node has noticed that those links are gone."""
    deadline = monotonic() + 20
    while monotonic() < deadline:
        with suppress(NodeRefused), raw_link(node.url, store.manifest) as link:
            if isinstance(link.greet(store.digest), Welcome):
                return
    raise AssertionError("the links are still counted")

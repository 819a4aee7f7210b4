"""A real node that is sent what no honest peer would send, on both of its planes.

Whatever comes, it answers properly or ends the connection, and then serves a good driver as before.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from random import Random
from time import monotonic, perf_counter
from zlib import crc32

import numpy as np
import psutil

from expert_network.errors import RemoteProtocolError
from expert_network.net.opening import open_link
from expert_network.store.manifest import Manifest
from expert_network.store.reader import Store
from expert_protocol.frames import (
    Goodbye,
    Reply,
    ReplyMode,
    WireDType,
    encode_dispatch,
    encode_goodbye,
    encode_ping,
)
from expert_protocol.greetings import encode_hello
from expert_protocol.header import (
    HEADER_SIZE,
    SUMMED_SIZE,
    ErrorCode,
    Kind,
    decode_header,
    encode_frame,
)
from tests.driver.programs import DEMO_STORE
from tests.fuzz.mutation import mutated_bytes, mutated_frame, noise
from tests.fuzz.running import Outcome
from tests.support.links import dispatch_of, hello_for, linked
from tests.support.nodes import NodeProcess, node_process

#: Seconds in which a node answers, or ends the connection, once it has all that comes.
ANSWER = 10.0
#: Seconds that a request without an end is waited for: the node waits for more of it.
UNFINISHED = 0.02
#: Frames on a link at most; the first that is refused for good ends it.
FRAMES = 4
#: Requests and frames before the node's memory and descriptors are taken as its normal ones.
WARM = 500

_STATUS = re.compile(rb"HTTP/\d\.\d (\d{3}) ")
_NONCE = "00" * 16


def run_live(count: int, seed: int) -> Outcome:
    """Send `count` inputs to a node of the demo's model, half of them requests, half frames."""
    outcome, random = Outcome("live node"), Random(f"{seed} live")
    with node_process("a", "a", DEMO_STORE) as node:
        peer = _Peer(node, random, outcome)
        expected = peer.tokens()
        for _ in peer.inputs(min(WARM, count)):
            pass
        process = psutil.Process(node.process.pid)
        descriptors, memory = _settled(process), process.memory_info().rss
        began = perf_counter()
        for _ in peer.inputs(count - WARM):
            pass
        outcome.seconds = perf_counter() - began
        outcome.growth = process.memory_info().rss - memory
        peer.check(_settled(process, descriptors) <= descriptors, "descriptors are left open")
        peer.check(peer.tokens() == expected, "a good driver gets other values than before")
        peer.check("Traceback" not in node.stderr(), f"a traceback:\n{node.stderr()[-2000:]}")
        peer.check(node.stop() == 0, "it did not stop as it should")
    return outcome


def _settled(process: psutil.Process, wanted: int = 0) -> int:
    """Its descriptors, once no more of them are closed, or there are only `wanted`."""
    deadline, before = monotonic() + ANSWER, -1
    while monotonic() < deadline:
        found = int(process.num_fds())
        if found <= wanted or (found == before and not wanted):
            break
        before = found
        with suppress(psutil.TimeoutExpired):
            process.wait(0.2)
    return found


class _Peer:
    """One who sends whatever comes to mind."""

    def __init__(self, node: NodeProcess, random: Random, outcome: Outcome) -> None:
        self._node, self._random, self._outcome = node, random, outcome
        self._manifest: Manifest = Store.open(DEMO_STORE).manifest
        self._requests = [request.encode() for request in _requests()]
        self._frames = list(_frames(self._manifest))
        self._hello = b"".join(
            encode_frame(Kind.HELLO, [encode_hello(hello_for(self._manifest.digest))])
        )

    def inputs(self, count: int) -> Iterator[None]:
        """Send them, requests and links in turns; yields after each connection."""
        sent = 0
        while sent < count:
            self._request()
            sent += 1 + self._link()
            yield

    def check(self, right: bool, problem: str, data: bytes = b"") -> None:
        """Note a failure unless it is `right`."""
        if not right:
            self._outcome.note(problem, data)

    def tokens(self) -> list[bytes]:
        """What a good driver gets for a row of each layer, in both modes."""
        with linked(self._node.url, self._manifest) as link:
            answers = []
            for spec in self._manifest.layers:
                row = np.linspace(-1, 1, spec.hidden, dtype=np.float32).reshape(1, -1)
                for mode in ReplyMode:
                    reply = link.ask(dispatch_of(spec.layer, row, [[0, 3, 5]], mode))
                    assert isinstance(reply, Reply)
                    answers.append(reply.data.tobytes())
            return answers

    # HTTP

    def _request(self) -> None:
        data = self._changed(self._requests)
        with closing(self._connected()) as sock:
            with suppress(ConnectionError):
                sock.sendall(data)
            whole = b"\r\n\r\n" in data
            answer = self._received(sock, ANSWER if whole else UNFINISHED, heads=True)
        found = _STATUS.match(answer)
        self.check(not answer or found is not None, "an answer is no HTTP", data)
        if found is not None:
            self.check(found[1] != b"500", "a request is answered with 500", data)
            self._outcome.refused += found[1] >= b"400"
            self._outcome.parsed += found[1] < b"400"
        else:
            self._outcome.refused += 1

    # Links

    def _link(self) -> int:
        """A link with some good frames and then others; how many others."""
        random = self._random
        with closing(open_link(self._node.url, None, ANSWER)) as sock:
            if random.random() < 0.2:
                frames = [self._changed([self._hello], frames=True)]
            else:
                good = random.randrange(3)
                frames = [self._hello, *(self._frame(n + 1, good=True) for n in range(good))]
                count = random.randrange(1, FRAMES + 1)
                frames += [self._frame(good + n + 1, good=False) for n in range(count)]
            data = b"".join(frames)
            with suppress(ConnectionError):
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
            answer = self._received(sock, ANSWER)
        self._look_at(answer, data)
        return len(frames)

    def _frame(self, sequence: int, good: bool) -> bytes:
        """A frame with this sequence number, mostly."""
        data = bytearray(self._random.choice(self._frames))
        data[8:12] = sequence.to_bytes(4, "little")
        whole = _summed(bytes(data))
        return whole if good else self._changed([whole], frames=True)

    def _look_at(self, answer: bytes, data: bytes) -> None:
        """Whole frames that a node may send, and no INTERNAL among them."""
        while answer:
            try:
                header = decode_header(answer[:HEADER_SIZE])
            except (RemoteProtocolError, ValueError):
                self.check(False, "what a node sends is no frame", data)
                return
            payload = answer[HEADER_SIZE : HEADER_SIZE + header.length]
            if header.kind is Kind.ERROR:
                code = int.from_bytes(payload[:2], "little")
                self.check(code != ErrorCode.INTERNAL, "a frame is answered with INTERNAL", data)
            self._outcome.refused += header.kind is Kind.ERROR
            self._outcome.parsed += header.kind in (Kind.REPLY, Kind.PING)
            answer = answer[HEADER_SIZE + header.length :]

    # Both

    def _changed(self, seeds: Sequence[bytes], frames: bool = False) -> bytes:
        chance = self._random.random()
        if chance < 0.05:
            return noise(self._random)
        if chance < 0.1:
            return self._random.choice(seeds)
        mutate = mutated_frame if frames and chance < 0.8 else mutated_bytes
        return mutate(self._random, seeds)

    def _connected(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._node.port), ANSWER)

    def _received(self, sock: socket.socket, seconds: float, heads: bool = False) -> bytes:
        """All until the end, or a whole head of HTTP; what there is after `seconds`."""
        data, deadline = b"", monotonic() + seconds
        try:
            while (left := deadline - monotonic()) > 0:
                sock.settimeout(left)
                more = sock.recv(1 << 16)
                data += more
                if not more or (heads and b"\r\n\r\n" in data):
                    return data
        except ConnectionError:
            return data
        except TimeoutError:
            pass
        self.check(seconds < ANSWER, f"nothing came within {seconds:g} s")
        return data


def _requests() -> Iterator[str]:
    for path in (
        *("/health", "/status", "/metrics", "/manifest", "/block/0/1", "/file/config.json"),
        *("/block/99999/0", f"/block/3/5/proof?nonce={_NONCE}", "/file/..%2f..%2fetc%2fpasswd"),
    ):
        for method in ("GET", "HEAD", "POST"):
            yield f"{method} {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    for headers in (
        'Range: bytes=5-99\r\nIf-Range: "a"',
        'If-None-Match: W/"a", "b"',
        'Authorization: ExpertKey nonce="a", cnonce="b", mac="c"',
        "Upgrade: expert-link/1\r\nConnection: Upgrade",
        "Transfer-Encoding: chunked\r\nContent-Length: 3",
        "Expect: 100-continue\r\nContent-Length: 1",
    ):
        for path in ("/manifest", "/link"):
            yield f"GET {path} HTTP/1.1\r\nHost: a\r\n{headers}\r\n\r\n"


def _frames(manifest: Manifest) -> Iterator[bytes]:
    for layer in manifest.layers[:2]:
        rows = np.ones((2, layer.hidden), np.float32)
        for dtype in (WireDType.F32, WireDType.BF16, WireDType.INT8):
            yield b"".join(
                encode_dispatch(dispatch_of(layer.layer, rows[:1], [[1, 2]], dtype=dtype), 1)
            )
            yield b"".join(
                encode_dispatch(dispatch_of(layer.layer, rows, [[4], [7, 0]], dtype=dtype), 1)
            )
        exact = dispatch_of(layer.layer, rows[:1], [[3]], ReplyMode.EXACT)
        yield b"".join(encode_dispatch(exact, 1))
    yield b"".join(encode_ping(1))
    yield b"".join(encode_goodbye(Goodbye("bye")))


def _summed(data: bytes) -> bytes:
    """The frame with its crc32 made right."""
    head, payload = data[:SUMMED_SIZE], data[HEADER_SIZE:]
    crc = crc32(payload, crc32(head))
    return head + crc.to_bytes(4, "little") + payload

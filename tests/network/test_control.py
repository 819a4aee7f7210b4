"""expert_network.net.control"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic

import pytest
from aiohttp import web

from expert_network.errors import (
    ExpertNetworkError,
    InputError,
    KeyRefused,
    NodeClosed,
    NodeRefused,
    NodeTimeout,
    NodeUnreachable,
    NotANode,
)
from expert_network.net.auth import ClusterKey
from expert_network.net.control import ControlClient
from tests.support.peers import refuse, serving_store
from tests.support.servers import read_head, serving, unused_port

KEY = ClusterKey.from_text("0f" * 32)
OTHER = ClusterKey.from_text("f0" * 32)
SOON = 0.2  # seconds: a deadline that is meant to pass
LONG = 20.0  # seconds: a deadline that is not


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "status").write_text('{"name": "a"}')
    (tmp_path / "health").write_text('{"status": "ok"}')
    (tmp_path / "text").write_bytes(bytes(range(256)))
    return tmp_path


def saying(answer: bytes, hold: bool = False) -> Callable[[socket.socket], None]:
    def handle(sock: socket.socket) -> None:
        read_head(sock)
        sock.sendall(answer)
        if hold:
            with suppress(ConnectionError):
                sock.recv(1)

    return handle


async def failure(
    url: str,
    key: ClusterKey | None = None,
    path: str = "/status",
    total: float = LONG,
    silence: float = LONG,
) -> ExpertNetworkError:
    async with ControlClient(url, key, total=total, silence=silence) as client:
        with pytest.raises(ExpertNetworkError) as caught:
            await client.get_json(path)
    assert client.url in str(caught.value)
    return caught.value


async def test_get(files: Path) -> None:
    """JSON and bytes come as they are."""
    async with serving_store(files) as peer, ControlClient(peer.url) as client:
        assert await client.get_json("/file/status") == {"name": "a"}
        assert await client.get_bytes("/file/text", 256) == bytes(range(256))


async def test_get_with_the_key(files: Path) -> None:
    """One challenge, then each answer brings the next nonce; the server is checked each time."""
    async with serving_store(files, KEY) as peer, ControlClient(peer.url, KEY) as client:
        for _ in range(3):
            assert await client.get_json("/file/status?x=%20") == {"name": "a"}
        found = await asyncio.gather(*(client.get_json("/file/status") for _ in range(20)))
        assert found == [{"name": "a"}] * 20
    assert peer.count("/file/status") == 23


async def test_an_old_nonce_is_replaced(files: Path) -> None:
    """When a kept nonce has expired the new challenge is answered, unseen by the caller."""
    async with serving_store(files, KEY) as peer, ControlClient(peer.url, KEY) as client:
        await client.get_json("/file/status")
        assert client._memory is not None
        client._memory._nonces.append("0" * 80)
        assert await client.get_json("/file/status") == {"name": "a"}


async def test_keys(files: Path) -> None:
    """No key, a wrong key and a server that proves nothing are three sentences."""
    async with serving_store(files, KEY) as peer:
        error = await failure(peer.url)
        assert isinstance(error, KeyRefused) and "--key-file" in str(error)
        error = await failure(peer.url, OTHER)
        assert isinstance(error, KeyRefused) and "refused the cluster key" in str(error)
    async with serving_store(files) as peer:
        error = await failure(peer.url, KEY, "/file/status")
        assert isinstance(error, KeyRefused) and "did not prove" in str(error)


async def test_health_needs_no_key(files: Path) -> None:
    """/health is answered without a proof, also to a client that has a key."""
    async with serving_store(files) as peer, ControlClient(peer.url, KEY) as client:
        assert await client.get_json("/health") == {"status": "ok"}


async def test_statuses(files: Path) -> None:
    """A status that the caller takes for an answer is one: /health says 503 while draining."""

    async def draining(request: web.Request, data: bytes) -> web.StreamResponse:
        return web.json_response({"status": "draining"}, status=503)

    async with serving_store(files, faults={"/health": draining, "/status": refuse}) as peer:
        async with ControlClient(peer.url) as client:
            found = await client.get_json("/health", statuses=(200, 503))
            assert found == {"status": "draining"}
        error = await failure(peer.url)
    assert isinstance(error, NodeRefused) and error.code == 503
    assert "answered /status with 503: this node is draining; wait" in str(error)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000,
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nhi",
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
        b'HTTP/1.1 401 No\r\nWWW-Authenticate: Basic realm="x"\r\nContent-Length: 0\r\n\r\n',
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 100_000 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\x15\x03\x01\x00\x02\x02\x46",
    ],
)
async def test_something_else_listens(answer: bytes) -> None:
    """HTML, redirects, passwords, endless headers and other protocols are NotANode."""
    with serving(saying(answer)) as port:
        error = await failure(f"127.0.0.1:{port}")
    assert isinstance(error, NotANode)


@pytest.mark.parametrize("length", ["", "Content-Length: 1000000000000\r\n"])
async def test_endless_answers(length: str) -> None:
    """An answer is cut at the caller's limit, whether or not its length was announced."""
    head = f"HTTP/1.1 200 OK\r\n{length}\r\n".encode()
    with serving(saying(head + bytes(100_000))) as port:
        async with ControlClient(f"127.0.0.1:{port}") as client:
            with pytest.raises(NotANode, match="more than 1000 bytes"):
                await client.get_bytes("/x", 1000)


async def test_nothing_listens() -> None:
    """A refused connection says what to start."""
    error = await failure(f"127.0.0.1:{unused_port()}")
    assert isinstance(error, NodeUnreachable) and "start expert-node" in str(error)


async def test_unresolvable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that does not exist is a sentence about the name."""

    def unknown(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    error = await failure("nowhere.invalid:1")
    assert isinstance(error, NodeUnreachable) and "name that cannot be found" in str(error)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{"])
async def test_hangs(answer: bytes) -> None:
    """A server that says nothing, or stops in the middle, is NodeTimeout after the silence."""
    start = monotonic()
    with serving(saying(answer, hold=True)) as port:
        error = await failure(f"127.0.0.1:{port}", silence=SOON)
    assert isinstance(error, NodeTimeout) and monotonic() - start < LONG / 2


async def test_the_total_counts() -> None:
    """`total` ends a request whatever drips in."""

    def drip(sock: socket.socket) -> None:
        read_head(sock)
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        sock.settimeout(SOON / 10)
        with suppress(ConnectionError):
            while True:
                with suppress(TimeoutError):
                    sock.recv(1)
                    return
                sock.sendall(b" ")

    start = monotonic()
    with serving(drip) as port:
        error = await failure(f"127.0.0.1:{port}", total=SOON)
    assert isinstance(error, NodeTimeout) and monotonic() - start < LONG / 2


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{"])
async def test_closed(answer: bytes) -> None:
    """A server that closes early is NodeClosed."""
    with serving(saying(answer)) as port:
        assert isinstance(await failure(f"127.0.0.1:{port}"), NodeClosed)


async def test_nothing_is_decompressed() -> None:
    """A compressed answer is not inflated: no bombs."""
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc"
    with serving(saying(head)) as port:
        async with ControlClient(f"127.0.0.1:{port}") as client:
            assert await client.get_bytes("/x", 10) == b"abc"


def test_a_bad_address() -> None:
    """What is not an address is InputError."""
    with pytest.raises(InputError):
        ControlClient("https://a")

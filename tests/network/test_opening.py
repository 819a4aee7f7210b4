"""expert_network.net.opening"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from threading import Event
from time import monotonic

import pytest

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
from expert_network.net import opening
from expert_network.net.auth import ClusterKey, NonceTable, challenge, verify
from expert_network.net.opening import open_link
from tests.support.servers import read_head, serving, unused_port

KEY = ClusterKey.from_text("0f" * 32)
OTHER = ClusterKey.from_text("f0" * 32)
SOON = 0.2  # seconds: a deadline that is meant to pass
LONG = 20.0  # seconds: a deadline that is not
SWITCH = "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: expert-link/1\r\n"


def node(
    key: ClusterKey | None = None, heard: list[str] | None = None, proof: str | None = None
) -> Callable[[socket.socket], None]:
    """A handler that upgrades, like a node with or without a key, and echoes one message."""
    nonces = NonceTable(monotonic)

    def handle(sock: socket.socket) -> None:
        head = read_head(sock).decode("ascii")
        if heard is not None:
            heard.append(head)
        info = ""
        if key is not None:
            match = re.search("Authorization: (.*)\r\n", head)
            try:
                info = verify(key, nonces, "GET", "/link", match[1] if match else None)
            except KeyRefused:
                sock.sendall(
                    f"HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: {challenge(nonces)}\r\n"
                    "Content-Length: 0\r\n\r\n".encode()
                )
                return
            info = f"Authentication-Info: {proof or info}\r\n"
        sock.sendall(f"{SWITCH}{info}\r\n".encode())
        with suppress(ConnectionError):
            sock.sendall(sock.recv(100))

    return handle


def saying(*parts: bytes, hold: bool = False) -> Callable[[socket.socket], None]:
    """A handler that reads a request, sends `parts`, and closes or (`hold`) waits."""

    def handle(sock: socket.socket) -> None:
        read_head(sock)
        for part in parts:
            sock.sendall(part)
        if hold:
            with suppress(ConnectionError):
                sock.recv(1)

    return handle


def failure(
    handler: Callable[[socket.socket], None], key: ClusterKey | None = None, timeout: float = LONG
) -> ExpertNetworkError:
    with serving(handler) as port, pytest.raises(ExpertNetworkError) as caught:
        open_link(f"http://127.0.0.1:{port}", key, timeout)
    if not isinstance(caught.value, KeyRefused):
        assert f"http://127.0.0.1:{port}" in str(caught.value)
    return caught.value


def assert_echo(sock: socket.socket) -> None:
    with sock:
        sock.sendall(b"frames")
        assert sock.recv(100) == b"frames"


@pytest.mark.parametrize("form", ["http://127.0.0.1:{}", "127.0.0.1:{}", "localhost:{}"])
def test_opens(form: str) -> None:
    """A node's socket is handed over after the upgrade: blocking, without delay, kept alive."""
    heard: list[str] = []
    with serving(node(heard=heard)) as port:
        sock = open_link(form.format(port), None, LONG)
        assert sock.gettimeout() is None
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert_echo(sock)
    first, *lines = heard[0].split("\r\n")
    assert first == "GET /link HTTP/1.1"
    assert lines[:3] == [f"Host: {form.format(port).removeprefix('http://')}",
                         "Connection: Upgrade", "Upgrade: expert-link/1"]  # fmt: skip


def test_opens_with_the_key() -> None:
    """Both sides prove the key, which is in neither request."""
    heard: list[str] = []
    with serving(node(KEY, heard)) as port:
        assert_echo(open_link(f"127.0.0.1:{port}", KEY, LONG))
    assert len(heard) == 2
    assert KEY.text not in "".join(heard)


def test_a_node_that_needs_a_key() -> None:
    """Without a key the sentence says how to give one."""
    error = failure(node(KEY))
    assert isinstance(error, KeyRefused)
    assert "--key-file" in str(error) and "EXPERT_NETWORK_KEY" in str(error)


def test_a_wrong_key() -> None:
    """With another key the sentence says that it is refused."""
    error = failure(node(KEY), OTHER)
    assert isinstance(error, KeyRefused) and "refused the cluster key" in str(error)


@pytest.mark.parametrize("proof", ['mac="00"', f'mac="{OTHER.mac("server", "GET", "/", "", "")}"'])
def test_a_node_that_proves_nothing(proof: str) -> None:
    """A server that lets us in without knowing the key is not trusted."""
    error = failure(node(KEY, proof=proof), KEY)
    assert isinstance(error, KeyRefused) and "did not prove" in str(error)


def test_a_node_that_does_not_ask() -> None:
    """With a key here and none there, an impostor could answer: refused."""
    error = failure(node(None), KEY)
    assert isinstance(error, KeyRefused) and "did not prove" in str(error)


@pytest.mark.parametrize("key", [None, KEY])
def test_a_401_of_somebody_else(key: ClusterKey | None) -> None:
    """A server that wants a password is not a node, whether or not we have a key."""
    answer = b'HTTP/1.1 401 No\r\nWWW-Authenticate: Basic realm="router"\r\n\r\n'
    assert isinstance(failure(saying(answer), key), NotANode)


def test_refused_connection() -> None:
    """Nothing listens: NodeUnreachable, at once, and what to start."""
    with pytest.raises(NodeUnreachable, match=r"refused the connection.*start expert-node"):
        open_link(f"127.0.0.1:{unused_port()}", None, LONG)


def test_unresolvable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that does not exist is NodeUnreachable, and the sentence is about the name."""

    def unknown(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(NodeUnreachable, match="name that cannot be found"):
        open_link("nowhere.invalid:1", None, LONG)


def test_a_look_up_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that does not answer cannot hold the caller beyond its deadline."""
    ended = Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: ended.wait(LONG) and [])
    start = monotonic()
    with pytest.raises(NodeTimeout, match="name that was not found within"):
        open_link("slow.invalid:1", None, SOON)
    ended.set()
    assert monotonic() - start < LONG / 2


@contextmanager
def deaf() -> Iterator[int]:
    """A port that accepts nothing: its backlog is full."""
    with socket.socket() as listener, ExitStack() as fillers:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = fillers.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


def test_an_address_that_hangs() -> None:
    """Where packets vanish NodeTimeout comes within the deadline."""
    start = monotonic()
    with deaf() as port, pytest.raises(NodeTimeout, match="did not"):
        open_link(f"127.0.0.1:{port}", None, SOON)
    assert monotonic() - start < LONG / 2


def test_every_address_gets_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses that refuse or hang do not keep the last one from being tried."""
    kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
    with serving(node()) as port, deaf() as hanging:
        ports = [unused_port(), hanging, port]
        found = [(*kind, ("127.0.0.1", each)) for each in ports]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)
        assert_echo(open_link("three.example", None, 5 * SOON))


@pytest.mark.parametrize("parts", [(), (b"HTTP/1.1 101 Swi",), (SWITCH.encode(),)])
def test_an_answer_that_hangs(parts: tuple[bytes, ...]) -> None:
    """A server that accepts and then says nothing, or half of it, is NodeTimeout in time."""
    start = monotonic()
    error = failure(saying(*parts, hold=True), timeout=SOON)
    assert isinstance(error, NodeTimeout) and "did not answer" in str(error)
    assert monotonic() - start < LONG / 2


def test_an_answer_that_drips() -> None:
    """Bytes that drip in do not extend the deadline."""

    def drip(sock: socket.socket) -> None:
        read_head(sock)
        sock.sendall(b"HTTP/1.1 101 S")
        sock.settimeout(SOON / 20)
        with suppress(ConnectionError):
            while True:
                with suppress(TimeoutError):
                    sock.recv(1)
                    return
                sock.sendall(b"x")

    start = monotonic()
    assert isinstance(failure(drip, timeout=SOON), NodeTimeout)
    assert monotonic() - start < LONG / 2


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html>hi</html>", "200 OK"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\nNot found", "404 Not Found"),
        (b"HTTP/1.0 302 Found\r\nLocation: /login\r\n\r\n", "302 Found"),
        (b'HTTP/1.1 302 Found\r\n\r\n{"error": "no"}', "302"),
        (b"HTTP/1.1 502 Bad Gateway\r\n\r\n<html>", "502 Bad Gateway"),
        (b'HTTP/1.1 500 X\r\n\r\n["error"]', "500"),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n", "switched"),
        (SWITCH.encode() + b"\r\nEXPN", "before it was asked"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "does not answer in HTTP"),
        (b"HTTP/2 200\r\n\r\n", "does not answer in HTTP"),
        (b"HTTP/1.1 abc\r\n\r\n", "does not answer in HTTP"),
        (b"\x15\x03\x01\x00\x02\x02\x46", "speaks TLS"),
        (b"HTTP/1.1 101 X\r\n" + b"X: y\r\n" * 10_000, "headers"),
    ],
)
def test_something_else_listens(answer: bytes, words: str) -> None:
    """Whatever is not a node is NotANode, and the sentence says what was seen."""
    error = failure(saying(answer))
    assert isinstance(error, NotANode) and words in str(error)
    assert "something other than an expert-node" in str(error)


def test_closed_without_an_answer() -> None:
    """A port that closes at once, as TLS servers do, is NodeClosed with that guess."""
    error = failure(saying())
    assert isinstance(error, NodeClosed) and "without TLS" in str(error)
    assert isinstance(failure(saying(b"HTTP/1.1 101 Sw")), NodeClosed)


@pytest.mark.parametrize("status", [403, 429, 500, 503])
def test_a_nodes_refusal(status: int) -> None:
    """A node's error is NodeRefused: its status, its sentence, and what to do."""
    body = b'{"error": "this node is draining."}'
    head = f"HTTP/1.1 {status} Unwilling\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    error = failure(saying(head, body, hold=True))
    assert isinstance(error, NodeRefused) and error.code == status
    assert f"{status}: this node is draining; " in str(error)


def test_a_refusals_words_are_safe() -> None:
    """Escape sequences and endless sentences of a peer do not reach the terminal."""
    body = b'{"error": "\\u001b[2J' + b"x" * 9000 + b'"}'
    error = failure(saying(b"HTTP/1.1 503 No\r\n\r\n" + body))
    assert "\x1b" not in str(error) and len(str(error)) < 800


def test_a_bad_address() -> None:
    """What is not an address is InputError, before anything is tried."""
    with pytest.raises(InputError):
        open_link("https://a:1", None, LONG)


def test_nothing_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt while opening closes the socket."""
    made: list[socket.socket] = []
    connect = opening._Opening._connect

    def remembered(self: opening._Opening) -> socket.socket:
        made.append(connect(self))
        return made[-1]

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(opening._Opening, "_connect", remembered)
    monkeypatch.setattr(opening._Opening, "_read_head", interrupted)
    with serving(node()) as port, pytest.raises(KeyboardInterrupt):
        open_link(f"127.0.0.1:{port}", None, LONG)
    assert [sock.fileno() for sock in made] == [-1]

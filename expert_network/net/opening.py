"""Opening a link: TCP, then an HTTP Upgrade on GET /link, then both sides prove the key.

Everything runs against one deadline, name look-up included, and every way that it can fail is a
sentence that says what to do.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic
from typing import Any

from expert_network.errors import ExpertNetworkError, NodeTimeout
from expert_network.net.address import format_url, is_ip, parse_url
from expert_network.net.answers import (
    MAX_ERROR_BODY,
    closed_unanswered,
    key_needed,
    key_not_proved,
    name_unknown,
    not_a_node,
    not_accepted,
    not_answered,
    refusal,
    unreachable,
)
from expert_network.net.auth import Answer, ClusterKey, KeyMemory, challenged_with

TARGET = "/link"
PROTOCOL = "expert-link/1"
#: Bytes of an answer's status line and headers; aiohttp's own limit is 8 KiB a line.
MAX_HEAD = 16 << 10
#: Seconds without traffic until the kernel asks whether the peer is there, then between questions.
KEEPALIVE_IDLE, KEEPALIVE_INTERVAL, KEEPALIVE_COUNT = 15, 5, 4

_STATUS = re.compile(r"HTTP/1\.[01] (\d{3})(?: (.*))?")
# Address family, and what connect() takes.
_Address = tuple[socket.AddressFamily, tuple[Any, ...]]


def open_link(url: str, key: ClusterKey | None, timeout: float) -> socket.socket:
    """A blocking socket on which both sides now speak frames. `timeout` (seconds) covers it all.

    Raises NodeUnreachable, NodeTimeout, NodeClosed, NotANode, KeyRefused or NodeRefused, and
    InputError for a `url` that is none.
    """
    return _Opening(url, key, timeout).run()


def prepare(sock: socket.socket) -> None:
    """Make a TCP socket fit for a link: no delay for small frames, and a dead peer is noticed."""
    with suppress(OSError):  # a socket pair has no such options
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Linux: a large frame's first segments are acknowledged at once, and so the others follow.
        if hasattr(socket, "TCP_QUICKACK"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # macOS calls the first one TCP_KEEPALIVE.
    idle = getattr(socket, "TCP_KEEPIDLE", getattr(socket, "TCP_KEEPALIVE", None))
    for option, value in (
        (idle, KEEPALIVE_IDLE),
        (getattr(socket, "TCP_KEEPINTVL", None), KEEPALIVE_INTERVAL),
        (getattr(socket, "TCP_KEEPCNT", None), KEEPALIVE_COUNT),
    ):
        if option is not None:
            with suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, option, value)


@dataclass(frozen=True)
class _Head:
    """An answer's status line and headers (names in lower case), and what came after them."""

    status: int
    reason: str
    headers: Mapping[str, str]
    rest: bytes

    @property
    def switched(self) -> bool:
        return self.status == 101 and self.headers.get("upgrade", "").lower() == PROTOCOL


class _Opening:
    """One attempt to open a link."""

    def __init__(self, url: str, key: ClusterKey | None, timeout: float) -> None:
        self._host, self._port = parse_url(url)
        self._url = format_url(self._host, self._port)
        self._timeout = timeout
        self._deadline = monotonic() + timeout
        self._memory = None if key is None else KeyMemory(key)

    def run(self) -> socket.socket:
        sock, head = self._ask(None)
        if head.status != 401:
            if self._memory is not None:
                sock.close()
                raise key_not_proved(self._url)
            return sock
        sock.close()
        nonce = challenged_with(head.headers.get("www-authenticate"))
        if nonce is None:
            raise not_a_node(self._url, "asks for a password, not for a cluster key")
        if self._memory is None:
            raise key_needed(self._url, given=False)
        return self._answered(self._memory.challenged("GET", TARGET, nonce))

    def _answered(self, answer: Answer) -> socket.socket:
        assert self._memory is not None
        sock, head = self._ask(answer)
        try:
            if head.status == 401:
                nonce = challenged_with(head.headers.get("www-authenticate"))
                if nonce is None or not self._memory.refused():
                    raise key_needed(self._url, given=True)
                sock.close()
                return self._answered(self._memory.challenged("GET", TARGET, nonce))
            try:
                self._memory.proved(answer, head.headers.get("authentication-info"))
            except ExpertNetworkError as error:
                raise key_not_proved(self._url) from error
        except BaseException:
            sock.close()
            raise
        return sock

    def _ask(self, answer: Answer | None) -> tuple[socket.socket, _Head]:
        """The connection and its answer: the switch, or a 401. Anything else is raised."""
        sock = self._connect()
        try:
            with self._explained():
                self._send(sock, answer)
                head = self._read_head(sock)
                if head.status == 401:
                    return sock, head
                if not head.switched:
                    raise self._refused(sock, head)
            if head.rest:
                raise not_a_node(self._url, "spoke before it was asked")
            sock.settimeout(None)
            prepare(sock)
        except BaseException:
            sock.close()
            raise
        return sock, head

    def _refused(self, sock: socket.socket, head: _Head) -> ExpertNetworkError:
        if head.status == 101:
            return not_a_node(self._url, "switched to a protocol that was not asked for")
        body = head.rest
        with suppress(OSError):
            while len(body) < self._body_size(head) and (data := self._receive(sock)):
                body += data
        return refusal(self._url, head.status, head.reason, body, TARGET)

    @staticmethod
    def _body_size(head: _Head) -> int:
        length = head.headers.get("content-length", "")
        stated = int(length[:9]) if length.isascii() and length.isdigit() else MAX_ERROR_BODY
        return min(stated, MAX_ERROR_BODY)

    # TCP

    def _left(self) -> float:
        left = self._deadline - monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def _connect(self) -> socket.socket:
        addresses = self._look_up()
        failure: OSError | None = None
        for number, (family, address) in enumerate(addresses):
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                # An address that swallows packets must leave time for the ones after it.
                sock.settimeout(self._left() / (len(addresses) - number))
                sock.connect(address)
                return sock
            except OSError as error:
                sock.close()
                # A refusal tells more than a silence.
                if failure is None or isinstance(failure, TimeoutError):
                    failure = error
            except BaseException:
                sock.close()
                raise
        raise self._unreachable(failure)

    def _unreachable(self, failure: OSError | None) -> ExpertNetworkError:
        if failure is None or isinstance(failure, TimeoutError):
            return not_accepted(self._url, self._timeout)
        return unreachable(self._url, failure)

    def _look_up(self) -> list[_Address]:
        """The host's addresses. In a thread, because a look-up has no deadline of its own."""
        found: SimpleQueue[list[_Address] | OSError] = SimpleQueue()

        def look_up() -> None:
            try:
                infos = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
                found.put([(info[0], info[4]) for info in infos])
            except (OSError, UnicodeError) as error:
                found.put(error if isinstance(error, OSError) else OSError(str(error)))

        if is_ip(self._host):
            look_up()
        else:
            Thread(target=look_up, name=f"look up {self._host}", daemon=True).start()
        try:
            answer = found.get(timeout=max(0.0, self._deadline - monotonic()))
        except Empty:
            problem = f"has a name that was not found within {self._timeout:g} s"
            raise NodeTimeout(self._url, problem, "check the name, or give its IP") from None
        if isinstance(answer, OSError):
            raise name_unknown(self._url, answer)
        return answer

    # HTTP

    def _send(self, sock: socket.socket, answer: Answer | None) -> None:
        host = self._url.removeprefix("http://")
        lines = [
            f"GET {TARGET} HTTP/1.1",
            f"Host: {host}",
            "Connection: Upgrade",
            f"Upgrade: {PROTOCOL}",
        ]
        if answer is not None:
            lines.append(f"Authorization: {answer.header}")
        sock.settimeout(self._left())
        sock.sendall("\r\n".join([*lines, "", ""]).encode("ascii"))

    def _receive(self, sock: socket.socket) -> bytes:
        sock.settimeout(self._left())
        return sock.recv(4096)

    def _read_head(self, sock: socket.socket) -> _Head:
        data = b""
        while b"\r\n\r\n" not in data:
            more = self._receive(sock)
            if not more:
                raise closed_unanswered(self._url)
            data += more
            self._check_start(data)
            if len(data) > MAX_HEAD:
                raise not_a_node(self._url, f"sent more than {MAX_HEAD} bytes of headers")
        head, _, rest = data.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        match = _STATUS.fullmatch(first)
        if match is None:
            raise not_a_node(self._url, "does not answer in HTTP")
        pairs = (line.partition(":") for line in lines)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        return _Head(int(match[1]), match[2] or "", headers, rest)

    def _check_start(self, data: bytes) -> None:
        if data[0] in (0x15, 0x16) and data[1:2] in (b"", b"\x03"):
            raise not_a_node(self._url, "speaks TLS, and nodes speak plain HTTP")
        if data[:5] != b"HTTP/"[: len(data)]:
            raise not_a_node(self._url, "does not answer in HTTP")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Socket errors after the connection stands, as sentences."""
        try:
            yield
        except TimeoutError as error:
            raise not_answered(self._url, self._timeout) from error
        except OSError as error:
            raise closed_unanswered(self._url) from error

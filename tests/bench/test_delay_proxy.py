"""The proxy that stands for a slow network: it delays, keeps order, and limits nothing."""

from __future__ import annotations

import hashlib
import socket
from threading import Event
from time import perf_counter

from tests.support.delay_proxy import delayed
from tests.support.servers import serving

DELAY_S = 0.02
LONG = bytes(range(256)) * (1 << 17)  # 32 MB: more than all buffers on the way take


def echo(sock: socket.socket) -> None:
    """Send back whatever comes until the peer says that it is done."""
    while data := sock.recv(1 << 16):
        sock.sendall(data)


def test_both_ways_are_delayed() -> None:
    """A byte and its echo take at least twice the delay, however many went before."""
    with (
        serving(echo) as port,
        delayed(DELAY_S, [port]) as (near,),
        socket.create_connection(("127.0.0.1", near)) as sock,
    ):
        for _ in range(3):
            started = perf_counter()
            sock.sendall(b"x")
            assert sock.recv(1) == b"x"
            assert perf_counter() - started >= 2 * DELAY_S


def test_a_stream_is_delayed_once() -> None:
    """What is sent in many pieces arrives whole, however late its reader is, and the delay does
    not add up over the pieces."""
    sent = Event()

    def digest(sock: socket.socket) -> None:
        assert sent.wait(30)  # all buffers on the way are full by then
        sum_ = hashlib.sha256()
        while data := sock.recv(1 << 16):
            sum_.update(data)
        sock.sendall(sum_.digest())

    pieces = [LONG[at : at + (1 << 14)] for at in range(0, len(LONG), 1 << 14)]
    with (
        serving(digest) as port,
        delayed(DELAY_S, [port]) as (near,),
        socket.create_connection(("127.0.0.1", near)) as sock,
    ):
        started = perf_counter()
        for piece in pieces:
            sock.sendall(piece)
        sock.shutdown(socket.SHUT_WR)
        sent.set()
        assert sock.recv(32) == hashlib.sha256(LONG).digest()
    assert perf_counter() - started < DELAY_S * len(pieces) / 4


def test_ports_are_in_the_order_of_the_targets() -> None:
    """Each port leads to its own target."""

    with (
        serving(lambda sock: sock.sendall(b"a")) as a,
        serving(lambda sock: sock.sendall(b"b")) as b,
        delayed(0.0, [a, b]) as ports,
    ):
        for port, expected in zip(ports, (b"a", b"b"), strict=True):
            with socket.create_connection(("127.0.0.1", port)) as sock:
                assert sock.recv(1) == expected

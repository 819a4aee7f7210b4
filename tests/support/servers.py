"""Servers for tests: a thread that handles each connection on a free port."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Thread

Handler = Callable[[socket.socket], object]


@contextmanager
def serving(handler: Handler, family: socket.AddressFamily = socket.AF_INET) -> Iterator[int]:
    """The port on which `handler` gets each connection, one after the other, in one thread.

    A handler's assertion fails the test when the context ends.
    """
    failures: list[BaseException] = []
    listener = socket.create_server(("127.0.0.1", 0), family=family)

    def serve() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with sock:
                try:
                    handler(sock)
                except (OSError, AssertionError) as failure:
                    failures.append(failure)

    thread = Thread(target=serve, name="test server")
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        with suppress(OSError):  # macOS: not connected
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)
        assert not thread.is_alive()
    for failure in failures:
        if isinstance(failure, AssertionError):
            raise failure


@contextmanager
def running(act: Callable[[], object]) -> Iterator[None]:
    """Run `act` in a thread, joined at the end; what it raises fails the test."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as failure:
            failures.append(failure)

    thread = Thread(target=run, name="test peer")
    thread.start()
    try:
        yield
    finally:
        thread.join(10)
        assert not thread.is_alive()
    for failure in failures:
        raise failure


def read_head(sock: socket.socket) -> bytes:
    """One HTTP request's head, blank line included; what there is if the peer closes."""
    data = b""
    while b"\r\n\r\n" not in data and (more := sock.recv(4096)):
        data += more
    return data


def unused_port() -> int:
    """A port on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port

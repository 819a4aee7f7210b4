"""Strangers' connections cost a node little, and never a driver its place."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from expert_network.net.auth import ClusterKey
from expert_network.store.reader import Store
from expert_node.strangers import MOST_STRANGERS, Strangers
from expert_protocol.frames import Pong
from tests.support.links import linked
from tests.support.nodes import NodeProcess, node_process

FLOOD = 300


class Connection:
    """Stands for a protocol and its transport."""

    def __init__(self) -> None:
        self.transport: Connection | None = self
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


def test_the_oldest_goes() -> None:
    """One stranger too many ends the one that came first, and nobody who is known."""
    strangers: Any = Strangers(2)
    strangers.make = Connection
    first, second = strangers(), strangers()
    strangers.know(first)
    third = strangers()
    assert not (first.aborted or second.aborted or third.aborted)
    fourth = strangers()
    assert second.aborted and not (first.aborted or third.aborted or fourth.aborted)
    third.transport = None  # it has left by itself
    strangers()
    assert not (third.aborted or fourth.aborted)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "key"
    file.write_text(ClusterKey.generate().text)
    file.chmod(0o600)
    return file


@pytest.fixture
def guarded(store: Store, key_file: Path) -> Iterator[NodeProcess]:
    with node_process("a,b", "a", store.path, "--key-file", str(key_file)) as node:
        yield node


def test_a_flood_of_silent_and_dripping_strangers(
    store: Store, key_file: Path, guarded: NodeProcess
) -> None:
    """A driver's link outlives them, another one is let in, and descriptors do not pile up."""
    process, key = psutil.Process(guarded.process.pid), ClusterKey.read(key_file)
    with linked(guarded.url, store.manifest, key) as link, ExitStack() as stack:
        before = process.num_fds()
        for number in range(FLOOD):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", guarded.port), 20))
            if number % 2:
                sock.sendall(b"GET /status HTTP/1.1\r\nX")
        link.send(link.connection.ping())
        assert isinstance(link.receive(), Pong)
        with linked(guarded.url, store.manifest, key) as another:
            another.send(another.connection.ping())
            assert isinstance(another.receive(), Pong)
            # A link has two descriptors: aiohttp keeps its own until it ends.
            assert process.num_fds() <= before + MOST_STRANGERS + 3

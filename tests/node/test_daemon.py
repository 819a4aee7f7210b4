"""expert-node as a process: starting, answering, stopping."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError

import numpy as np
import psutil
import pytest

from expert_network.backend import detect
from expert_network.errors import NodeRefused
from expert_network.experts.partition import load_partition
from expert_network.net.stream import open_link
from expert_network.store.reader import Store
from expert_protocol.frames import ErrorReply, Goodbye, Reply, ReplyMode, WireDType, Working
from expert_protocol.header import VERSION
from expert_roster.rendezvous import partition
from expert_roster.roster import Roster
from tests.support.links import SILENCE, dispatch_of, linked
from tests.support.nodes import NodeProcess, node_command, node_process, node_processes

AB = Roster.parse("a,b")


def rows(count: int, store: Store, layer: int = 0) -> np.ndarray:
    """float32 (count, hidden), the same every time."""
    hidden = store.manifest.layer(layer).hidden
    return np.random.default_rng(count).normal(size=(count, hidden)).astype(np.float32)


def test_ready_line(node: NodeProcess, store: Store) -> None:
    """When it is ready a node says its name, address and share in one line on stdout."""
    owned = partition(AB, "a", store.manifest.shape)
    count = sum(map(len, owned.values()))
    assert node.ready_line.startswith(f"expert-node a ready on http://127.0.0.1:{node.port}: ")
    assert f": {count} of 16 blocks, " in node.ready_line
    assert "loading: " in node.stderr()


def test_status(node: NodeProcess, store: Store) -> None:
    """/status tells the roster, the model and exactly the blocks that the roster gives it."""
    status = node.get("/status")
    owned = partition(AB, "a", store.manifest.shape)
    assert (status["name"], status["protocol"]) == ("a", VERSION)
    assert status["model_digest"] == store.digest
    assert Roster.from_wire(status["roster"]) == AB
    layers = status["partition"]["layers"]
    assert {int(layer): ids for layer, ids in layers.items()} == {
        layer: ids.tolist() for layer, ids in owned.items()
    }
    assert status["partition"]["total_blocks"] == 16
    assert status["rss_bytes"] <= status["peak_rss_bytes"]


@pytest.mark.parametrize("mode", list(ReplyMode))
def test_answers_as_the_partition_does(node: NodeProcess, store: Store, mode: ReplyMode) -> None:
    """A reply over the link has the bits of the same computation in one process."""
    blocks = partition(AB, "a", store.manifest.shape)
    local = load_partition(store, blocks, detect())
    own = blocks[1].tolist()
    question = dispatch_of(1, rows(3, store), [own[:2], own[1:2], own], mode)
    with linked(node.url, store.manifest) as link:
        reply = link.ask(question)
    assert isinstance(reply, Reply)
    expected = local.compute(
        1, mode, question.rows, question.offsets, question.ids, question.weights
    )
    assert np.array_equal(reply.data, expected)
    assert reply.compute_us > 0


def test_reply_travels_as_it_was_asked(node: NodeProcess, store: Store) -> None:
    """Rows asked in bf16 are answered in bf16, within its rounding of the float32 answer."""
    own = partition(AB, "a", store.manifest.shape)[0].tolist()
    values = WireDType.BF16.decode(WireDType.BF16.encode(rows(2, store)))
    with linked(node.url, store.manifest) as link:
        full = link.ask(dispatch_of(0, values, [own[:2], own[:2]]))
        assert isinstance(full, Reply)
        full_data = full.data.copy()
        half = link.ask(dispatch_of(0, values, [own[:2], own[:2]], dtype=WireDType.BF16))
    assert isinstance(half, Reply)
    assert half.dtype is WireDType.BF16
    np.testing.assert_allclose(half.dtype.decode(half.data), full_data, rtol=2**-7)


def test_several_drivers(node: NodeProcess, store: Store) -> None:
    """Two drivers that ask by turns each get the answer to their own question."""
    own = partition(AB, "a", store.manifest.shape)[0].tolist()
    with linked(node.url, store.manifest) as first, linked(node.url, store.manifest) as second:
        asked = [dispatch_of(0, rows(n, store), [own[:1]] * n) for n in (1, 2)]
        first.send(first.connection.dispatch(asked[0]))
        second.send(second.connection.dispatch(asked[1]))
        replies = [first.receive(), second.receive()]
        status = node.get("/status")
    assert [len(reply.data) for reply in replies if isinstance(reply, Reply)] == [1, 2]
    assert status["links"] >= 2


def test_drivers_that_come_and_go(store: Store) -> None:
    """A driver that has left leaves nothing behind: no thread, no descriptor."""
    counts = []
    with node_process("a", "a", store.path) as node:
        process = psutil.Process(node.process.pid)
        for number in range(60):
            with linked(node.url, store.manifest) as link:
                assert isinstance(link.ask(dispatch_of(0, rows(1, store), [[0]])), Reply)
            if number in (9, 59):
                counts.append((process.num_threads(), process.num_fds()))
    (threads, files), (threads_later, files_later) = counts
    assert threads_later - threads < 10
    assert files_later - files < 10


def test_a_node_without_blocks_starts(store: Store) -> None:
    """A node that owns nothing says so and serves."""
    with node_process("a=1e18,b=1e-9", "b", store.path) as idle:
        assert ": 0 of 16 blocks, 0 B" in idle.ready_line
        assert "no block" in idle.stderr()
        with linked(idle.url, store.manifest) as link:
            answer = link.ask(dispatch_of(0, rows(1, store), [[0]]))
            assert isinstance(answer, ErrorReply)
            assert "does not hold block (0, 0)" in answer.message


def test_nodes_side_by_side(store: Store) -> None:
    """The nodes of one roster hold every block once between them."""
    with node_processes("a,b,c", store.path) as nodes:
        counts = [node.get("/status")["partition"]["blocks"] for node in nodes]
    assert sum(counts) == 16


IMPATIENT = """
from expert_node import cli
import expert_network.backend
expert_network.backend.detect()
from expert_node import daemon
daemon.HEADER_SECONDS = 0.2
cli.main()
"""


def test_headers_that_do_not_end(store: Store) -> None:
    """A connection that brings no whole request within the deadline is closed."""
    python, _, _, *options = node_command("a", "a", store.path)
    node = NodeProcess([python, "-c", IMPATIENT, *options])
    try:
        node.wait_ready()
        for begun in (b"", b"GET /health HTTP/1.1\r\nHost: x\r\n"):
            with socket.create_connection(("127.0.0.1", node.port), SILENCE) as sock:
                sock.sendall(begun)
                assert sock.recv(100) == b""
    finally:
        node.close()


# Stopping


@contextmanager
def held(store: Store, tmp_path: Path, *options: str) -> Iterator[tuple[NodeProcess, Path]]:
    """A node that computes one dispatch for each byte that is written to the returned FIFO."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    python, _, _, *rest = node_command("a", "a", store.path, *options)
    node = NodeProcess([python, "-m", "tests.support.held_node", str(gate), *rest])
    try:
        yield node.wait_ready(), gate
    finally:
        node.kill()
        node.close()


def test_working_while_computing(store: Store, tmp_path: Path) -> None:
    """While a dispatch is computed or waits for its turn its driver hears WORKING each second."""
    with (
        held(store, tmp_path) as (node, gate),
        linked(node.url, store.manifest) as first,
        linked(node.url, store.manifest) as second,
    ):
        for link in (first, second):  # the second dispatch goes once the first is computed
            link.send(link.connection.dispatch(dispatch_of(0, rows(1, store), [[0]])))
            assert isinstance(link.stream.receive(SILENCE), Working)
            assert isinstance(link.stream.receive(SILENCE), Working)
        gate.write_bytes(b"x")
        assert isinstance(first.receive(), Reply)
        gate.write_bytes(b"x")
        reply = second.receive()
        assert isinstance(reply, Reply)
        assert reply.queue_us > 1_000_000


def test_sigterm_finishes_the_dispatch_at_hand(store: Store, tmp_path: Path) -> None:
    """On SIGTERM the dispatch that is being computed is answered, then comes GOODBYE; exit 0."""
    with held(store, tmp_path) as (node, gate), linked(node.url, store.manifest) as link:
        link.send(link.connection.dispatch(dispatch_of(0, rows(1, store), [[0]])))
        assert isinstance(link.stream.receive(SILENCE), Working)
        node.send(signal.SIGTERM)
        assert isinstance(link.stream.receive(SILENCE), Working)
        gate.write_bytes(b"x")
        assert isinstance(link.receive(), Reply)
        parting = link.receive()
        assert isinstance(parting, Goodbye)
        assert "node a is shutting down" in parting.reason
        assert node.wait() == 0


def test_idle_links_are_told_goodbye(store: Store) -> None:
    """On SIGTERM a driver that asks for nothing is told goodbye at once; exit 0."""
    with node_process("a", "a", store.path) as node, linked(node.url, store.manifest) as link:
        node.send(signal.SIGTERM)
        assert isinstance(link.receive(), Goodbye)
        assert node.wait() == 0


def test_the_drain_has_an_end(store: Store, tmp_path: Path) -> None:
    """A dispatch that outlasts --drain-seconds is cut off and counted in the log; still exit 0."""
    with (
        held(store, tmp_path, "--drain-seconds", "0.2") as (node, _),
        linked(node.url, store.manifest) as link,
    ):
        link.send(link.connection.dispatch(dispatch_of(0, rows(1, store), [[0]])))
        assert isinstance(link.stream.receive(SILENCE), Working)
        node.send(signal.SIGTERM)
        assert node.wait() == 0
        assert "1 links were cut off before their dispatch was done" in node.stderr()


def test_a_second_signal_forces(store: Store, tmp_path: Path) -> None:
    """Ctrl-C drains and exits with 130; a second one does not wait for the drain."""
    with (
        held(store, tmp_path, "--drain-seconds", "3600") as (node, _),
        linked(node.url, store.manifest) as link,
    ):
        link.send(link.connection.dispatch(dispatch_of(0, rows(1, store), [[0]])))
        assert isinstance(link.stream.receive(SILENCE), Working)
        node.send(signal.SIGINT)
        assert isinstance(link.stream.receive(SILENCE), Working)
        node.send(signal.SIGINT)
        assert node.wait() == 130


def test_draining_is_said(store: Store, tmp_path: Path) -> None:
    """A draining node says so on /health and takes no new links."""
    with held(store, tmp_path) as (node, gate), linked(node.url, store.manifest) as link:
        link.send(link.connection.dispatch(dispatch_of(0, rows(1, store), [[0]])))
        assert isinstance(link.stream.receive(SILENCE), Working)
        node.send(signal.SIGTERM)
        assert isinstance(link.stream.receive(SILENCE), Working)
        with pytest.raises(HTTPError) as answer:
            node.get("/health")
        assert (answer.value.code, answer.value.read()) == (503, b'{"status": "draining"}')
        answer.value.close()
        with pytest.raises(NodeRefused, match="node a is shutting down"):
            open_link(node.url, None, SILENCE)
        gate.write_bytes(b"x")


def test_interrupt(store: Store) -> None:
    """Ctrl-C ends an idle node with 130 and no traceback."""
    with node_process("a", "a", store.path) as node:
        node.send(signal.SIGINT)
        assert node.wait() == 130
        assert "Traceback" not in node.stderr()


def test_stop_at_eof(store: Store) -> None:
    """With --stop-at-eof a node ends when its standard input closes, as if by SIGTERM."""
    command = node_command("a", "a", store.path, "--stop-at-eof")
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with process:
        assert process.stdin and process.stdout
        assert b" ready on " in process.stdout.readline()
        assert process.poll() is None
        process.stdin.close()
        process.stdin = None
        assert process.wait(30) == 0


STOPPED_WHILE_LOADING = """
import os, signal, sys
from expert_network.backend import detect
detect()
from expert_network.store.reader import Store
from expert_node.cli import main
from expert_node.stopping import Stop
told, tell = os.pipe()
read, request = Store.read_block_into, Stop.request
def stopped_read(store, *args):
    os.kill(os.getpid(), signal.SIGTERM)
    os.read(told, 1)
    read(store, *args)
def telling_request(stop, code):
    request(stop, code)
    os.write(tell, b"x")
Store.read_block_into, Stop.request = stopped_read, telling_request
main()
"""


def test_stop_while_loading(store: Store) -> None:
    """A node that is stopped while it loads stops loading, and never says that it is ready."""
    python, _, _, *options = node_command("a", "a", store.path)
    node = NodeProcess([python, "-c", STOPPED_WHILE_LOADING, *options])
    try:
        assert node.wait() == 0
        assert node.read_line() == ""
        assert "stopped while loading" in node.stderr()
    finally:
        node.close()

"""The fault proxy: each fault does what it says, in its direction, at its point, and no more."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from time import perf_counter

import pytest

from expert_driver.chaos.faults import (
    Call,
    Corrupt,
    Cut,
    Delay,
    Drip,
    Fault,
    HalfOpen,
    Planned,
    Point,
    Throttle,
    Way,
)
from expert_driver.chaos.proxy import HOST, FaultProxy
from expert_driver.config import NetworkConfig, Sampling
from expert_driver.conversation import Conversation
from expert_driver.opening import opened
from expert_network.errors import NodeUnreachable
from expert_protocol.frames import encode_dispatch
from tests.driver.programs import DEMO_STORE
from tests.support.nodes import NodeProcess, node_processes
from tests.support.servers import serving, unused_port
from tests.support.wire import dispatch

LAST_LAYER = 7
WAIT_S = 10.0


def echo(sock: socket.socket) -> None:
    """Send back whatever comes until the peer says that it is done, or is gone."""
    try:
        while data := sock.recv(1 << 16):
            sock.sendall(data)
    except ConnectionError:
        pass


def receive(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := sock.recv(count - len(data))):
        data += more
    return data


@contextmanager
def connected(proxy: FaultProxy, node: int = 0) -> Iterator[socket.socket]:
    with socket.create_connection((HOST, proxy.ports[node]), WAIT_S) as sock:
        yield sock


def end_of(sock: socket.socket) -> str:
    """How a connection ends on which nothing more comes."""
    try:
        assert sock.recv(1) == b""
    except ConnectionError:
        return "reset"
    return "clean"


def end_of_new(proxy: FaultProxy, node: int = 0) -> str:
    """The same of one that is made now, and may be over before it is used."""
    try:
        with connected(proxy, node) as sock:
            return end_of(sock)
    except ConnectionError:
        return "reset"


@contextmanager
def echoing(*faults: Fault) -> Iterator[FaultProxy]:
    """A proxy before an echo, all of whose connections suffer `faults`."""
    with serving(echo) as port, FaultProxy({"a": (HOST, port)}, LAST_LAYER) as proxy:
        for fault in faults:
            proxy.always("a", fault)
        yield proxy


# One fault at a time


@pytest.mark.parametrize("way, times", [(Way.TO_NODE, 1), (Way.TO_DRIVER, 1), (Way.BOTH, 2)])
def test_delay(way: Way, times: int) -> None:
    """A delay counts once for each direction that it is for."""
    with echoing(Delay(0.1, way=way)) as proxy, connected(proxy) as sock:
        started = perf_counter()
        sock.sendall(b"x")
        assert receive(sock, 1) == b"x"
        assert perf_counter() - started >= 0.1 * times


def test_jitter_keeps_the_order() -> None:
    """Bytes that are delayed for different times do not overtake each other."""
    data = bytes(range(256)) * 4
    with echoing(Delay(0.0, jitter=0.02)) as proxy, connected(proxy) as sock:
        for at in range(0, len(data), 16):
            sock.sendall(data[at : at + 16])
        assert receive(sock, len(data)) == data


def test_throttle() -> None:
    """Bytes come at the rate at most, and all of them."""
    data = bytes(range(200)) * 10
    with echoing(Throttle(10_000, Way.TO_DRIVER)) as proxy, connected(proxy) as sock:
        started = perf_counter()
        sock.sendall(data)
        assert receive(sock, len(data)) == data
        # The first slice, a hundredth of a second, is free.
        assert perf_counter() - started >= 0.19


def test_drip() -> None:
    """Bytes come one by one."""
    with echoing(Drip(0.02, Way.TO_DRIVER)) as proxy, connected(proxy) as sock:
        started = perf_counter()
        sock.sendall(b"0123456789")
        assert [sock.recv(10) for _ in range(10)] == [bytes([48 + n]) for n in range(10)]
        assert perf_counter() - started >= 9 * 0.02


def test_corrupt() -> None:
    """One bit of one byte is flipped, once, wherever reads cut the bytes."""
    with echoing(Corrupt(offset=5, bit=3)) as proxy, connected(proxy) as sock:
        for part in (b"abc", b"defg", b"abcdefgh"):
            sock.sendall(part)
        assert receive(sock, 15) == b"abcdeng" + b"abcdefgh"


def test_half_open() -> None:
    """A half-open connection says nothing and does not end; healed, it is reset."""
    with echoing(HalfOpen(Way.TO_DRIVER)) as proxy, connected(proxy) as sock:
        sock.sendall(b"x")
        sock.settimeout(0.2)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        proxy.heal()
        sock.settimeout(WAIT_S)
        with pytest.raises(ConnectionResetError):
            sock.recv(1)


def test_half_open_ends_when_one_side_gives_up() -> None:
    """What the driver closes is closed for the node as well: a proxy collects no connections."""
    ended = Event()

    def until_end(sock: socket.socket) -> None:
        assert sock.recv(1) == b""
        ended.set()

    with serving(until_end) as port, FaultProxy({"a": (HOST, port)}) as proxy:
        proxy.always("a", HalfOpen())
        with connected(proxy) as sock:
            sock.sendall(b"x")
        assert ended.wait(WAIT_S)


@pytest.mark.parametrize("reset", [True, False])
def test_cut(reset: bool) -> None:
    """A cut is a reset or a clean end, and the next connection may be cut as well."""
    with echoing(Cut(reset)) as proxy:
        for _ in range(2):
            assert end_of_new(proxy) == ("reset" if reset else "clean")


def test_healed() -> None:
    """Once healed, connections old and new work as if nothing had been."""
    with echoing(Delay(60.0)) as proxy:
        with connected(proxy) as old:
            proxy.heal()
            old.sendall(b"x")
            assert receive(old, 1) == b"x"
        with connected(proxy) as new:
            new.sendall(b"x")
            assert receive(new, 1) == b"x"


def test_a_node_that_refuses() -> None:
    """A connection to a node that is not there ends at once."""
    with FaultProxy({"a": (HOST, unused_port())}) as proxy:
        assert end_of_new(proxy) == "reset"


def test_a_host_that_is_not_known() -> None:
    """A name that cannot be looked up is said at once."""
    with pytest.raises(NodeUnreachable, match="has a name that cannot be found"):
        FaultProxy({"a": ("no.such.invalid", 8301)})


# At a point


def frame(layer: int) -> bytes:
    return b"".join(encode_dispatch(dispatch(layer=layer), 1))


def test_a_fault_strikes_between_two_bytes() -> None:
    """What stands before the frame goes on, and nothing of the frame itself."""
    before, struck = frame(2), frame(3)
    with echoing() as proxy, connected(proxy) as sock:
        proxy.plan(Planned(HalfOpen(Way.TO_NODE), Point(0, 3)))
        sock.sendall(before + struck)
        assert receive(sock, len(before)) == before
        assert proxy.wait_fired(1, WAIT_S)
        sock.settimeout(0.1)
        with pytest.raises(TimeoutError):
            sock.recv(1)


def test_a_byte_of_the_frame_itself() -> None:
    """Corrupt(n) towards a node at a point is byte n of that frame."""
    first, second = frame(3), frame(4)
    with echoing() as proxy, connected(proxy) as sock:
        proxy.plan(Planned(Corrupt(40, 7, Way.TO_NODE), Point(0, 4)))
        sock.sendall(first + second)
        wrong = second[:40] + bytes([second[40] ^ 128]) + second[41:]
        assert receive(sock, len(first + second)) == first + wrong


def test_a_fault_waits_for_its_node() -> None:
    """A fault for b does not strike a; if it lasts, the next connection suffers it too."""
    with (
        serving(echo) as a,
        serving(echo) as b,
        FaultProxy({"a": (HOST, a), "b": (HOST, b)}, LAST_LAYER) as proxy,
    ):
        proxy.plan(Planned(Cut(), Point(0, 2), "b", lasting=True))
        with connected(proxy, 0) as to_a, connected(proxy, 1) as to_b:
            to_a.sendall(frame(2))
            assert receive(to_a, len(frame(2))) == frame(2)
            to_b.sendall(frame(4))
            assert end_of(to_b) == "reset"
            assert [(f.node, f.point) for f in proxy.fired] == [("b", Point(0, 4))]
        assert end_of_new(proxy, 1) == "reset"


# Between a real driver and real nodes


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[NodeProcess]]:
    """Two nodes that no test harms."""
    with node_processes("a,b", DEMO_STORE) as nodes:
        yield nodes


@contextmanager
def talking(nodes: list[NodeProcess]) -> Iterator[tuple[FaultProxy, Conversation]]:
    """A conversation whose every byte to and from nodes goes through a proxy."""
    addresses = {name: (HOST, node.port) for name, node in zip("ab", nodes, strict=True)}
    with FaultProxy(addresses, LAST_LAYER) as proxy:
        urls = tuple(proxy.urls().values())
        config = NetworkConfig(urls, True, None, None, Path("/nowhere"))
        with opened(str(DEMO_STORE), config, with_text=True) as session:
            assert session.text is not None
            yield proxy, Conversation(session.engine, session.text, Sampling(max_tokens=12))


def test_exact_points_of_a_reply(nodes: list[NodeProcess]) -> None:
    """Every layer of every token of a reply is a point, and strikes there, none in another."""
    points = [Point(token, layer) for token in range(12) for layer in range(8)]
    with talking(nodes) as (proxy, talk):
        proxy.plan(*(Planned(Call(lambda: None), point) for point in points))
        "".join(talk.ask("Tell me a story."))
        assert [fired.point for fired in proxy.fired] == points
        assert [fired.planned.point for fired in proxy.fired] == points
        proxy.restart()
        proxy.plan(Planned(Call(lambda: None), Point(0, 0)))
        "".join(talk.ask("And then?"))
        assert proxy.fired[-1].point == Point(0, 0)

"""expert_node.links over socket pairs, with a compute that the test controls."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Event, Thread
from typing import Any, ClassVar, cast

import pytest

from expert_network.errors import NodeClosed
from expert_network.net.stream import FrameStream
from expert_node.compute import Computer
from expert_node.links import Limits, Link, Links
from expert_node.metrics import Counters
from expert_protocol.connection import DriverConnection, DriverEvent
from expert_protocol.frames import (
    Dispatch,
    ErrorCode,
    ErrorReply,
    Goodbye,
    Hello,
    Pong,
    Reply,
    Welcome,
    Working,
)
from expert_protocol.header import MAGIC, VERSION
from tests.support.links import DriverLink
from tests.support.wire import DIGEST, dispatch, hello, hidden, reply_to, welcome

#: How a frame of this version starts.
OURS = MAGIC + bytes([VERSION])
#: Far apart, so that a busy machine does not confuse them. Seconds.
LIMITS = Limits(links=2, refusals=1, linger=5.0)


@dataclass
class FakeComputer:
    """Answers when `go` is set, with `refusal` if there is one. Knows no layers."""

    layers: ClassVar[dict[int, int]] = {}

    go: Event = field(default_factory=Event)
    asked: Event = field(default_factory=Event)
    refusal: ErrorReply | None = None
    broken: bool = False

    def answer(self, dispatch: Dispatch, take: object = None) -> Reply | ErrorReply:
        self.asked.set()
        assert self.go.wait(30)
        if self.broken:
            raise RuntimeError("broken")
        return self.refusal or reply_to(dispatch)


@dataclass
class Bench:
    """Links with what they were given, and the ends of the links that were started."""

    computer: FakeComputer
    counters: Counters
    links: Links

    @contextmanager
    def driver(self) -> Iterator[DriverLink]:
        """A link on which nothing has been said; its thread has ended when the context does."""
        ours, theirs = socket.socketpair()
        assert self.links.reserve() is None
        served = self.links.start(theirs, "driver x")
        assert served is not None
        connection = DriverConnection(hidden)
        stream = FrameStream[DriverEvent](ours, connection, "node")
        try:
            yield DriverLink(stream, connection)
        finally:
            self.computer.go.set()
            stream.close()
            served.result(30)

    @contextmanager
    def greeted(self) -> Iterator[DriverLink]:
        """A link after HELLO and WELCOME."""
        with self.driver() as link:
            assert isinstance(greet(link), Welcome)
            yield link


def greet(link: DriverLink, said: Hello | None = None) -> DriverEvent:
    link.send(link.connection.hello(said or hello()))
    return link.receive()


def bench(limits: Limits = LIMITS) -> Bench:
    computer, counters = FakeComputer(), Counters()
    links = Links(welcome(), "made_up", cast(Computer, computer), counters, hidden, limits)
    return Bench(computer, counters, links)


def test_answers() -> None:
    """After HELLO and WELCOME each dispatch gets its reply and each ping its pong."""
    it = bench()
    it.computer.go.set()
    with it.greeted() as link:
        assert isinstance(link.ask(dispatch()), Reply)
        link.send(link.connection.ping())
        assert isinstance(link.receive(), Pong)
        assert isinstance(link.ask(dispatch((1, 3))), Reply)
    assert it.links.traffic() == (link.stream.bytes_sent, link.stream.bytes_received)
    assert len(it.links) == 0


@pytest.mark.parametrize(
    ("said", "code", "words"),
    [
        (hello(model_digest="9f" * 32), ErrorCode.MODEL, f"made_up model {DIGEST[:12]}"),
        (hello(model_digest="9f" * 32), ErrorCode.MODEL, "9f9f9f9f9f9f;"),
        (hello(protocol=7), ErrorCode.VERSION, "version 3 and this driver version 7"),
    ],
)
def test_hello_is_checked(said: Hello, code: ErrorCode, words: str) -> None:
    """Another model or protocol version is refused in a sentence that names both, and closed."""
    it = bench()
    with it.driver() as link:
        answer = greet(link, said)
        assert isinstance(answer, ErrorReply)
        assert answer.code is code
        assert words in answer.message
        assert link.connection.closed
    assert it.counters.errors[code] == 1


def test_an_epoch_is_announced() -> None:
    """Links that are open carry a new epoch in what they answer next; new ones are greeted so."""
    it = bench()
    it.computer.go.set()
    with it.greeted() as link:
        assert link.connection.epoch == 3
        it.links.announce(replace(welcome(), epoch=4))
        assert isinstance(link.ask(dispatch()), Reply)
        assert link.connection.epoch == 4
        with it.greeted() as other:
            assert other.connection.epoch == 4


def test_a_different_roster_is_not_refused() -> None:
    """A driver with another roster is welcomed, and told ours: it is the one to decide."""
    with bench().driver() as link:
        answer = greet(link, hello(roster_digest="00" * 32, epoch=9))
        assert isinstance(answer, Welcome)
        assert answer.roster_digest != "00" * 32


def test_an_error_leaves_the_link_usable() -> None:
    """A dispatch that is refused is answered with ERROR, and the next one is computed."""
    it = bench()
    it.computer.go.set()
    it.computer.refusal = ErrorReply(ErrorCode.NOT_OWNED, "not here")
    with it.greeted() as link:
        assert link.ask(dispatch()) == it.computer.refusal
        it.computer.refusal = None
        assert isinstance(link.ask(dispatch()), Reply)
    assert it.counters.errors[ErrorCode.NOT_OWNED] == 1


def test_working_is_said() -> None:
    """WORKING comes again and again while a dispatch is computed, and then the whole reply."""
    it = bench(replace(LIMITS, working=0.001))
    with it.greeted() as link:
        for _ in range(50):
            it.computer.go.clear()
            link.send(link.connection.dispatch(dispatch((1,) * 2000)))
            assert isinstance(link.stream.receive(30), Working)
            assert isinstance(link.stream.receive(30), Working)
            it.computer.go.set()
            assert isinstance(link.receive(), Reply)


def test_a_reply_waits_for_a_working_that_is_on_its_way() -> None:
    """A WORKING never falls into a REPLY or behind it, although another thread sends it."""
    it = bench(replace(LIMITS, working=0.001))
    with it.greeted() as link:
        connection = only_link(it)._connection
        working, reply = connection.working, connection.reply
        replied, overtaken = Event(), []

        def slow_working() -> Any:
            it.computer.go.set()
            overtaken.append(replied.wait(0.2))
            return working()

        def noticed_reply(answer: Reply) -> Any:
            replied.set()
            return reply(answer)

        connection.working = slow_working  # type: ignore[method-assign]
        connection.reply = noticed_reply  # type: ignore[method-assign, assignment]
        link.send(link.connection.dispatch(dispatch()))
        assert isinstance(link.stream.receive(30), Working)
        assert isinstance(link.receive(), Reply)
        assert overtaken and not any(overtaken)


@pytest.mark.parametrize(("working", "frames"), [(1000.0, 0), (0.0, 1)])
def test_quick_dispatches_hear_no_working(working: float, frames: int) -> None:
    """WORKING is for a dispatch that has been computed for half a period, and for no other."""
    it = bench(replace(LIMITS, working=1000.0))
    with it.greeted() as link:
        node_link = only_link(it)
        node_link._limits = replace(LIMITS, working=working)
        node_link.say_working()
        link.send(link.connection.dispatch(dispatch()))
        assert it.computer.asked.wait(30)
        node_link.say_working()
        it.computer.go.set()
        assert isinstance(link.receive(), Reply)
        node_link.say_working()
        assert link.working == frames


def only_link(it: Bench) -> Link:
    """The node's end of the one link there is."""
    (link,) = it.links._links
    return link


def test_silence_after_the_upgrade() -> None:
    """A link on which no HELLO comes within the deadline is closed."""
    with bench(replace(LIMITS, handshake=0.05)).driver() as link, pytest.raises(NodeClosed):
        link.receive()


def test_a_hello_that_drips() -> None:
    """The deadline for the HELLO is one for all of it, not for each byte."""
    it = bench(replace(LIMITS, handshake=0.2))
    with it.driver() as link:
        frame = b"".join(link.connection.hello(hello()))
        with pytest.raises(NodeClosed):
            for byte in frame:
                link.send([bytes([byte])])
                it.computer.asked.wait(0.02)


@pytest.mark.parametrize(("said", "words"), [(0, "driver x was idle"), (5, "finish a frame")])
def test_an_idle_link_ends(said: int, words: str, caplog: pytest.LogCaptureFixture) -> None:
    """A driver that says nothing for long is let go; the log tells it from one that breaks off."""
    caplog.set_level("INFO")
    with bench(replace(LIMITS, idle=0.05)).greeted() as link:
        link.send([b"EXPN\x01"[:said]])
        with pytest.raises(NodeClosed):
            link.receive()
    assert words in caplog.text
    assert caplog.text.count("idle") == (not said)


def test_too_many_links() -> None:
    """One link more than allowed is told BUSY; when one has left there is room again."""
    it = bench()
    with it.greeted():
        with it.greeted(), it.driver() as third:
            assert it.links.reserve() == "too many links are open"
            answer = greet(third)
            assert isinstance(answer, ErrorReply)
            assert answer.code is ErrorCode.BUSY
            assert "2 links" in answer.message
        with it.greeted():
            pass


def test_a_place_is_kept_before_the_link_begins() -> None:
    """Links that are still being handed over count: no more begin than there are threads for."""
    it = bench()
    refusals = [it.links.reserve() for _ in range(4)]
    assert refusals == [None, None, None, "too many links are open"]
    it.links.release()
    assert it.links.reserve() is None
    for _ in range(3):
        it.links.release()
    with it.greeted():
        assert len(it.links) == 1
    assert it.links._places == 0


def test_no_link_starts_once_drained() -> None:
    """A hand-over that draining overtakes is closed at once, and its place is given back."""
    it = bench()
    ours, theirs = socket.socketpair()
    assert it.links.reserve() is None
    assert it.links.drain("leaving", 30) == 0
    assert it.links.start(theirs, "driver x") is None
    assert it.links.reserve() == "leaving"
    with ours:
        assert ours.recv(1) == b""
    assert it.links._places == 0


def test_no_thread_to_be_had(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """When the system gives no thread, that driver is let go, and the next one is served."""
    it = bench()
    ours, theirs = socket.socketpair()
    start = Thread.start

    def refused(thread: Thread) -> None:
        if thread.name.startswith("link"):
            raise RuntimeError("can't start new thread")
        start(thread)

    assert it.links.reserve() is None
    with monkeypatch.context() as patch:
        patch.setattr(Thread, "start", refused)
        assert it.links.start(theirs, "driver y") is None
    with ours:
        assert ours.recv(1) == b""
    assert "driver y got no link: can't start new thread" in caplog.text
    with it.greeted():
        assert len(it.links) == 1
    assert it.links._places == 0


def test_a_driver_that_dies_while_it_waits(caplog: pytest.LogCaptureFixture) -> None:
    """A driver that is gone before its reply ends its link, whoever notices: no traceback."""
    caplog.set_level("INFO")
    it = bench(replace(LIMITS, working=0.001))
    with it.greeted() as link:
        node_link = only_link(it)
        link.send(link.connection.dispatch(dispatch()))
        assert it.computer.asked.wait(30)
        link.stream.close()
        while not node_link.stream.closed:  # the watch does it, or we do
            node_link.say_working()
    assert "link ended: node driver x reset the link" in caplog.text
    assert "Traceback" not in caplog.text


def test_drain_waits_for_the_dispatch_at_hand() -> None:
    """Draining answers the dispatch that is computed, says goodbye everywhere, cuts nothing."""
    it = bench()
    with it.greeted() as busy, it.greeted() as idle:
        busy.send(busy.connection.dispatch(dispatch()))
        assert it.computer.asked.wait(30)
        drained = drain(it, 30)
        assert idle.receive() == Goodbye("leaving")
        it.computer.go.set()
        assert isinstance(busy.receive(), Reply)
        assert busy.receive() == Goodbye("leaving")
        for link in (busy, idle):
            link.stream.close()
        assert drained() == 0


def test_drain_cuts_what_does_not_end(caplog: pytest.LogCaptureFixture) -> None:
    """What is not done in time is closed, and counted; its own thread takes that for an end."""
    it = bench()
    with it.greeted() as link:
        link.send(link.connection.dispatch(dispatch()))
        assert it.computer.asked.wait(30)
        assert it.links.drain("leaving", 0.05) == 1
        with pytest.raises(NodeClosed):
            link.receive()
    assert "Traceback" not in caplog.text


def test_no_link_begins_while_draining() -> None:
    """A driver that greets a draining node is told DRAINING."""
    it = bench()
    with it.driver() as link:
        it.links.ending = "leaving"
        assert greet(link) == ErrorReply(ErrorCode.DRAINING, "leaving")


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (b"GET / HTTP/1.1\r\nHost: aaaaaaaaaaaa\r\n", ErrorCode.PROTOCOL),
        (b"EXPN\x07\x01" + bytes(26), ErrorCode.VERSION),
        (OURS + b"\x63" + bytes(26), ErrorCode.PROTOCOL),
        (OURS + b"\x01" + bytes(18) + b"\xff\xff\xff\xff" + bytes(4), ErrorCode.TOO_LARGE),
    ],
)
def test_nonsense_is_refused(frame: bytes, code: ErrorCode) -> None:
    """What is not the protocol is answered with an ERROR that arrives, and the link is closed."""
    it = bench()
    with it.driver() as link:
        link.connection.hello(hello())  # so that our end takes an answer
        link.send([frame])
        answer = link.receive()
        assert isinstance(answer, ErrorReply)
        assert answer.code is code
    assert it.counters.errors[code] == 1


def test_a_broken_compute_ends_only_its_link(caplog: pytest.LogCaptureFixture) -> None:
    """A bug of ours closes the link it happened on, is logged, and leaves the others alone."""
    it = bench()
    it.computer.go.set()
    with it.greeted() as other:
        with it.greeted() as link:
            it.computer.broken = True
            with pytest.raises(NodeClosed):
                link.ask(dispatch())
        it.computer.broken = False
        assert isinstance(other.ask(dispatch()), Reply)
    assert "the link from driver x failed" in caplog.text


def drain(it: Bench, seconds: float) -> Any:
    """Drain in a thread; a function that waits for its result."""
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(1)
    future = pool.submit(it.links.drain, "leaving", seconds)

    def result() -> int:
        with pool:
            return future.result(30)

    return result

"""expert_network.net.stream"""

from __future__ import annotations

import errno
import math
import select
import socket
from collections.abc import Iterator
from threading import Event, Thread
from time import monotonic
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_network.errors import (
    Cancelled,
    LocalProtocolError,
    NodeClosed,
    NodeTimeout,
    RemoteProtocolError,
)
from expert_network.net import inbox
from expert_network.net import stream as module
from expert_network.net.stream import FrameStream
from expert_protocol.connection import DriverConnection, DriverEvent, NodeConnection, NodeEvent
from expert_protocol.frames import (
    Dispatch,
    ErrorReply,
    Goodbye,
    Pong,
    Reply,
    ReplyMode,
    WireDType,
    Working,
)
from expert_protocol.header import Buffer, ErrorCode
from tests.support.servers import running
from tests.support.wire import dispatch, events, facts, greeted, hello, hidden, reply_to, welcome

SOON = 0.15  # seconds: a deadline that is meant to pass
LONG = 20.0  # seconds: a deadline that is not


class Pair:
    """A driver's stream on a real socket; the node's end is a bare socket and its connection."""

    def __init__(self, hidden_size: int = 8) -> None:
        self.sock, self.peer = socket.socketpair()
        self.driver, self.node = greeted(lambda layer: hidden_size)
        self.stream: FrameStream[DriverEvent] = FrameStream(self.sock, self.driver, "a")

    def ask(self, asked: Dispatch | None = None) -> Dispatch:
        """Send a dispatch, and take it at the node's end."""
        asked = asked or dispatch()
        frame = self.driver.dispatch(asked)
        events(self.node, frame)
        self.stream.send(frame, LONG)
        size = sum(memoryview(part).nbytes for part in frame)
        while size:
            size -= len(self.peer.recv(size))
        return asked

    def say(self, frame: list[Buffer]) -> None:
        self.peer.sendall(b"".join(frame))

    def assert_closed(self, by: type[Exception] = LocalProtocolError) -> None:
        """The stream is closed, and each further use meets what closed it."""
        assert self.stream.closed and self.stream.fileno() == -1
        with pytest.raises(by):
            self.stream.receive(LONG)
        with pytest.raises(by):
            self.stream.send([b"x"])

    def close(self) -> None:
        self.stream.close()
        self.peer.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


@pytest.fixture
def wide() -> Iterator[Pair]:
    """A pair whose rows have 4096 values."""
    pair = Pair(4096)
    yield pair
    pair.close()


def test_a_whole_link_over_a_socket() -> None:
    """Greeting, dispatches with WORKING, a ping and a goodbye pass between two streams."""
    ours, theirs = socket.socketpair()
    driver, node = DriverConnection(hidden), NodeConnection(hidden)
    here: FrameStream[DriverEvent] = FrameStream(ours, driver, "a")
    there: FrameStream[NodeEvent] = FrameStream(theirs, node, "driver")
    asked = dispatch((2, 1))

    def serve() -> None:
        assert there.receive(LONG) == hello()
        there.send(node.welcome(welcome()))
        for _ in range(3):
            assert facts(there.receive(LONG)) == facts(asked)
            there.send(node.working())
            there.send(node.reply(reply_to(asked)))
        there.receive(LONG)
        there.send(node.pong())
        assert there.receive(LONG) == Goodbye("done")
        there.close()

    with running(serve):
        here.send(driver.hello(hello()))
        assert here.receive(LONG) == welcome()
        for _ in range(3):
            here.send(driver.dispatch(asked))
            assert here.receive(LONG) == Working()
            assert facts(here.receive(LONG)) == facts(reply_to(asked))
        here.send(driver.ping())
        assert here.receive(LONG) == Pong()
        here.send(driver.goodbye("done"))
        here.close()
    assert here.bytes_sent == there.bytes_received
    assert here.bytes_received == there.bytes_sent


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 60), max_size=12))
def test_any_split_gives_the_same_events(cuts: list[int]) -> None:
    """However the bytes arrive, the same events come out."""
    pair = Pair()
    asked = pair.ask()
    frames = [*pair.node.working(), *pair.node.working(), *pair.node.reply(reply_to(asked))]
    data = b"".join(frames)

    def drip() -> None:
        rest = data
        for cut in cuts:
            pair.peer.sendall(rest[:cut])
            rest = rest[cut:]
        pair.peer.sendall(rest)

    with running(drip):
        found = [pair.stream.receive(LONG) for _ in range(3)]
    assert found[:2] == [Working(), Working()]
    assert facts(found[2]) == facts(reply_to(asked))
    assert pair.stream.bytes_received == len(data)
    pair.stream.close()
    pair.peer.close()


def test_one_read_takes_all_that_is_there(pair: Pair) -> None:
    """What came with a frame is not in the socket any more: `next` has it, and `idle` says so."""
    asked = pair.ask()
    pair.say([*pair.node.working(), *pair.node.reply(reply_to(asked))[:-1]])
    pair.stream.pull()
    assert pair.stream.next() == Working()
    assert pair.stream.next() is None and not pair.stream.idle
    pair.peer.sendall(reply_to(asked).data.tobytes())
    pair.stream.pull()
    assert facts(pair.stream.next()) == facts(reply_to(asked))
    assert pair.stream.next() is None and pair.stream.idle
    assert pair.stream.bytes_taken == pair.stream.bytes_received


def test_what_the_kernel_does_not_take_is_pushed_on(wide: Pair) -> None:
    """`push` never waits: what is left goes when there is room, each byte once and in order."""
    there: FrameStream[NodeEvent] = FrameStream(wide.peer, wide.node, "driver")
    big, small = dispatch((1,) * 500, width=4096, dtype=WireDType.F32), dispatch(width=4096)
    for asked in (big, small):
        frame = wide.driver.dispatch(asked)
        assert wide.stream.push(frame) == sum(memoryview(part).nbytes for part in frame)
        assert wide.stream.pushing
    got: list[Any] = []

    def serve() -> None:
        got.extend(facts(there.receive(LONG)) for _ in range(2))

    with running(serve):
        room = select.poll()
        room.register(wide.sock, select.POLLOUT)
        while not wide.stream.push_on():
            room.poll(LONG * 1000)
    assert got == [facts(big), facts(small)] and not wide.stream.pushing
    there.close()


def test_large_frames_pass(wide: Pair) -> None:
    """A frame far over the socket's buffers is sent in parts and received whole; memory is reused
    and, after a very large one, given back."""
    driver, node = wide.driver, wide.node
    there: FrameStream[NodeEvent] = FrameStream(wide.peer, node, "driver")
    big = dispatch((1,) * 2600, width=4096, dtype=WireDType.F32)

    def serve() -> None:
        first = there.receive(LONG)
        assert isinstance(first, Dispatch) and np.array_equal(first.rows, big.rows)
        assert there._inbox._size > inbox.KEPT_BUFFER
        there.send(node.reply(reply_to(first)), LONG)
        assert isinstance(there.receive(LONG), Dispatch)
        assert there._inbox._size == inbox.FIRST_BUFFER

    with running(serve):
        wide.stream.send(driver.dispatch(big), LONG)
        answer = wide.stream.receive(LONG)
        assert isinstance(answer, Reply) and answer.data.shape == big.rows.shape
        wide.stream.send(driver.dispatch(dispatch(width=4096)))
    there.close()


def test_events_are_views_of_one_buffer(pair: Pair) -> None:
    """Two replies of a size land in the same memory: nothing is allocated in the token loop."""
    seen = []
    for _ in range(2):
        pair.say(pair.node.reply(reply_to(pair.ask())))
        answer = pair.stream.receive(LONG)
        assert isinstance(answer, Reply)
        seen.append(answer.data.__array_interface__["data"][0])
    assert seen[0] == seen[1]


# Silence


def test_silence_is_a_timeout(pair: Pair) -> None:
    """No frame within the silence closes the stream with NodeTimeout, and names the node."""
    pair.ask()
    start = monotonic()
    with pytest.raises(NodeTimeout, match="node a was silent for 0"):
        pair.stream.receive(SOON)
    assert SOON <= monotonic() - start + 0.001 < LONG / 2
    pair.assert_closed(NodeTimeout)


def test_dripping_does_not_extend_the_silence(pair: Pair) -> None:
    """A peer that sends a byte now and then is as late as one that sends nothing."""
    asked = pair.ask()
    data = b"".join(pair.node.reply(reply_to(asked)))
    stopped = Event()

    def drip() -> None:
        for at in range(len(data)):
            if stopped.wait(SOON / 4):
                return
            try:
                pair.peer.send(data[at : at + 1])
            except OSError:
                return

    with running(drip):
        start = monotonic()
        with pytest.raises(NodeTimeout, match="did not finish a frame"):
            pair.stream.receive(4 * SOON)
        assert monotonic() - start < len(data) * SOON / 4 / 2
        stopped.set()


def test_a_frame_that_has_begun_has_its_own_deadline(pair: Pair) -> None:
    """`frame` bounds a frame from its first byte, however long the silence may be."""
    pair.ask()
    pair.peer.send(b"E")
    start = monotonic()
    with pytest.raises(NodeTimeout, match="did not finish a frame"):
        pair.stream.receive(LONG, frame=SOON)
    assert monotonic() - start < LONG / 2


def test_working_restarts_the_silence(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each whole frame counts: a slow node that says WORKING is never taken for dead."""
    now = monotonic()
    monkeypatch.setattr(module, "monotonic", lambda: now)
    asked = pair.ask()
    pair.say([*pair.node.working() * 3, *pair.node.reply(reply_to(asked))])
    for _ in range(3):
        now += 4
        assert pair.stream.receive(5) == Working()
    now += 4
    assert isinstance(pair.stream.receive(5), Reply)


def test_silence_counts_from_the_last_frame(pair: Pair) -> None:
    """A caller that was busy elsewhere waits no longer for it, and still gets what came in time."""
    pair.say(pair.node.reply(reply_to(pair.ask())))
    pair.stream._last -= LONG
    assert isinstance(pair.stream.receive(LONG), Reply)
    pair.ask()
    pair.stream._last -= LONG
    start = monotonic()
    with pytest.raises(NodeTimeout):
        pair.stream.receive(LONG)
    assert monotonic() - start < LONG / 2


def test_a_large_frame_has_longer(wide: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow network a long frame is not late as long as it keeps a stated pace."""
    monkeypatch.setattr(module, "SLOWEST", 10_000)
    asked = wide.ask(dispatch((1,) * 8, width=4096, dtype=WireDType.F32))
    data = b"".join(wide.node.reply(reply_to(asked)))
    done = Event()

    def say() -> None:
        for at in range(10):
            wide.peer.sendall(data[at * 1000 : (at + 1) * 1000])
            done.wait(SOON)
        wide.peer.sendall(data[10_000:])

    with running(say):
        assert isinstance(wide.stream.receive(9 * SOON), Reply)


def test_a_large_frame_that_stalls_is_silent(wide: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longer time is for frames that keep coming: one that stops is late after the silence."""
    monkeypatch.setattr(module, "SLOWEST", 10_000)
    asked = wide.ask(dispatch((1,) * 8, width=4096, dtype=WireDType.F32))
    data = b"".join(wide.node.reply(reply_to(asked)))
    wide.peer.sendall(data[:1000])
    start = monotonic()
    with pytest.raises(NodeTimeout):
        wide.stream.receive(SOON)
    assert monotonic() - start < len(data) / 10_000


def test_sending_restarts_the_silence(pair: Pair) -> None:
    """A link that was idle for long is not late the moment it is used again."""
    pair.stream._last -= 1000
    asked = pair.ask()
    pair.say(pair.node.reply(reply_to(asked)))
    assert isinstance(pair.stream.receive(SOON), Reply)


def test_an_infinite_silence_waits(pair: Pair) -> None:
    """inf means no deadline at all."""
    asked = pair.ask()
    with running(lambda: pair.say(pair.node.reply(reply_to(asked)))):
        assert isinstance(pair.stream.receive(math.inf), Reply)


def test_a_peer_that_reads_nothing_is_a_timeout(wide: Pair) -> None:
    """send gives up after its timeout, also in the middle of a frame."""
    big = dispatch((1,) * 2000, width=4096, dtype=WireDType.F32)
    start = monotonic()
    with pytest.raises(NodeTimeout, match="took no bytes"):
        wide.stream.send(wide.driver.dispatch(big), SOON)
    assert monotonic() - start < LONG / 2
    wide.assert_closed(NodeTimeout)


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=5),
    takes=st.lists(st.integers(1, 40), min_size=1, max_size=10),
)
def test_partial_sends_are_continued(sizes: list[int], takes: list[int]) -> None:
    """Wherever the kernel stops taking bytes, the rest follows, each byte once."""
    buffers: list[Buffer] = [bytes([at]) * size for at, size in enumerate(sizes)]
    taken = bytearray()

    class Stingy:
        """A socket that takes a few bytes at a time."""

        def __getattr__(self, name: str) -> Any:
            return lambda *args: None

        def sendmsg(self, parts: list[Buffer]) -> int:
            data = b"".join(parts)[: takes[len(taken) % len(takes)]]
            taken.extend(data)
            return len(data)

    stream: FrameStream[DriverEvent] = FrameStream(Stingy(), DriverConnection(hidden), "a")  # type: ignore[arg-type]
    stream.send(buffers, LONG)
    assert taken == b"".join(buffers)
    assert stream.bytes_sent == sum(sizes)


# Ends


def test_the_end_of_the_stream(pair: Pair) -> None:
    """A node that closes is NodeClosed at once, not a timeout."""
    pair.ask()
    pair.peer.close()
    with pytest.raises(NodeClosed, match="closed the link;"):
        pair.stream.receive(LONG)
    pair.assert_closed(NodeClosed)


@pytest.mark.parametrize("size", [1, 31, 32, 40])
def test_the_end_inside_a_frame(pair: Pair, size: int) -> None:
    """A node that dies in the middle of a reply is NodeClosed, and the sentence says where."""
    asked = pair.ask()
    pair.peer.sendall(b"".join(pair.node.reply(reply_to(asked)))[:size])
    pair.peer.close()
    with pytest.raises(NodeClosed, match="middle of a frame"):
        pair.stream.receive(LONG)
    pair.assert_closed(NodeClosed)


def test_sending_to_a_closed_peer(pair: Pair) -> None:
    """A broken pipe is NodeClosed."""
    pair.peer.close()
    with pytest.raises(NodeClosed, match="reset the link"):
        pair.stream.send(pair.driver.dispatch(dispatch()))
    pair.assert_closed(NodeClosed)


def test_garbage_is_refused_and_closes(pair: Pair) -> None:
    """What is not the protocol raises RemoteProtocolError; the peer hears why, then the end."""
    pair.ask()
    pair.peer.sendall(b"HTTP/1.1 400 Bad Request\r\nHost: x"[:32])
    with pytest.raises(RemoteProtocolError):
        pair.stream.receive(LONG)
    pair.assert_closed(RemoteProtocolError)
    data = b""
    while more := pair.peer.recv(4096):
        data += more
    (event,) = events(pair.node, [data])
    assert isinstance(event, Goodbye) and "48 54 54 50" in event.reason


def test_a_refusal_is_read_although_bytes_are_left() -> None:
    """On TCP a refusal survives the unread rest of what was refused, if the stream lingers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    node = NodeConnection(hidden)
    driver = DriverConnection(hidden)
    driver.hello(hello())
    stream: FrameStream[NodeEvent] = FrameStream(ours, node, "driver", linger=LONG)
    peer.sendall(b"\x00" * 100_000)

    def refuse() -> None:
        with pytest.raises(RemoteProtocolError):
            stream.receive(LONG)

    with peer, running(refuse):
        # Had it closed with bytes unread, a reset would arrive now and take the ERROR with it.
        trouble = select.poll()
        trouble.register(peer, 0)
        assert trouble.poll(SOON * 1000) == []
        data = b""
        while more := peer.recv(4096):
            data += more
        peer.close()
    (event,) = events(driver, [data])
    assert isinstance(event, ErrorReply) and event.code is ErrorCode.PROTOCOL


def test_an_interrupt_inside_a_frame_closes(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C inside a frame nobody knows what was read: the socket is closed."""
    pair.ask()

    def interrupted(data: memoryview) -> None:
        raise KeyboardInterrupt

    pair.say(pair.node.working())
    monkeypatch.setattr(pair.driver, "feed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pair.stream.receive(LONG)
    pair.assert_closed()


def test_a_closed_connection_is_not_read(pair: Pair) -> None:
    """After a GOODBYE nothing more can come: reading on is our own mistake."""
    pair.say(pair.node.goodbye("bye"))
    assert pair.stream.receive(LONG) == Goodbye("bye")
    with pytest.raises(LocalProtocolError, match="has ended"):
        pair.stream.receive(LONG)


def test_interrupt_wakes_a_reader(pair: Pair) -> None:
    """interrupt() from another thread raises Cancelled, and a last frame can still go out."""
    caught: list[BaseException] = []

    def read() -> None:
        try:
            pair.stream.receive(LONG)
        except Cancelled as error:
            caught.append(error)

    thread = Thread(target=read)
    thread.start()
    pair.stream.interrupt()
    thread.join(LONG)
    assert len(caught) == 1 and not pair.stream.closed
    pair.stream.finish(pair.driver.goodbye("stopped"))
    assert events(pair.node, [pair.peer.recv(1000)]) == [Goodbye("stopped")]
    assert pair.stream.closed


def test_the_last_words_after_an_interrupt_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """On TCP a peer that is asking at that very moment reads the goodbye, and meets no reset."""
    monkeypatch.setattr(module, "PARTING", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    driver, node = greeted(hidden)
    stream: FrameStream[NodeEvent] = FrameStream(ours, node, "driver", linger=LONG)
    stream.interrupt()
    with peer, running(lambda: stream.finish(node.goodbye("leaving"))):
        arrived = select.poll()
        arrived.register(peer, select.POLLIN)
        assert arrived.poll(LONG * 1000)
        for part in driver.dispatch(dispatch()):
            peer.sendall(part)
        data = b""
        while more := peer.recv(4096):
            data += more
    assert events(driver, [data]) == [Goodbye("leaving")]


def test_interrupt_leaves_what_has_arrived(pair: Pair) -> None:
    """A frame that was there already is still read; Cancelled comes after it."""
    asked = pair.ask()
    pair.say(pair.node.reply(reply_to(asked)))
    pair.stream.interrupt()
    assert isinstance(pair.stream.receive(LONG), Reply)
    with pytest.raises(Cancelled):
        pair.stream.receive(LONG)


def test_close_wakes_a_reader(pair: Pair) -> None:
    """A stream closed by another thread ends a receive with NodeClosed."""
    caught: list[BaseException] = []

    def read() -> None:
        try:
            pair.stream.receive(LONG)
        except NodeClosed as error:
            caught.append(error)

    thread = Thread(target=read)
    thread.start()
    pair.stream.close()
    thread.join(LONG)
    assert not thread.is_alive() and len(caught) <= 1


def test_closing_says_why(pair: Pair) -> None:
    """Who uses a stream that another thread closed is told what that thread gave as the reason."""
    pair.stream.close(Cancelled("cut off"))
    pair.stream.close()
    with pytest.raises(Cancelled, match="cut off"):
        pair.stream.send([b"x"])
    pair.assert_closed(Cancelled)


@pytest.mark.parametrize(
    ("sent", "error", "words"),
    [
        (-errno.EPIPE, NodeClosed, "reset the link"),
        (-errno.EAGAIN, NodeTimeout, "took no bytes for 3 s"),
        (7, NodeTimeout, "took no bytes for 3 s"),
    ],
)
def test_what_other_hands_could_not_send(
    pair: Pair, sent: int, error: type[Exception], words: str
) -> None:
    """The stream is closed, and says what its own sending would have said."""
    caught = pair.stream.broken(sent, 3)
    assert isinstance(caught, error) and words in str(caught)
    pair.assert_closed(error)


def test_finish_on_a_dead_peer_is_quiet(pair: Pair) -> None:
    """The last words to a peer that is gone raise nothing, and the socket is closed."""
    pair.peer.close()
    pair.stream.finish(pair.driver.goodbye("bye"))
    pair.stream.finish()
    pair.assert_closed()


def test_traffic_of_a_token() -> None:
    """OLMoE's shape over two nodes costs at most 0.27 MB per token, counted at the sockets."""
    width, layers, total = 2048, 16, 0
    for _node in range(2):
        pair = Pair(width)
        for layer in range(layers):
            asked = pair.ask(dispatch((4,), layer=layer, width=width, mode=ReplyMode.SUM))
            pair.say(pair.node.reply(reply_to(asked)))
            assert isinstance(pair.stream.receive(LONG), Reply)
        total += pair.stream.bytes_sent + pair.stream.bytes_received
        pair.stream.close()
        pair.peer.close()
    assert total <= 270_000

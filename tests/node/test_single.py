"""One row answered natively: the same as through the stream, whatever comes."""

from __future__ import annotations

import socket
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Event
from typing import Any

import numpy as np
import pytest

from expert_network import kernels
from expert_network.net.stream import FrameStream
from expert_node.compute import Computer
from expert_node.links import Limits, Links
from expert_node.metrics import Counters
from expert_node.single import Single
from expert_protocol.connection import DriverConnection, DriverEvent
from expert_protocol.frames import (
    Dispatch,
    ErrorCode,
    ErrorReply,
    Pong,
    Reply,
    ReplyMode,
    Welcome,
    WireDType,
    Working,
)
from tests.support.fixed_blocks import FixedBlocks
from tests.support.links import DriverLink
from tests.support.wire import dispatch, hello, hidden, welcome

pytestmark = pytest.mark.skipif(not Single.there, reason="the native kernels are not built")

LIMITS = Limits(working=0.2)
SHAPE = [(layer, 8) for layer in range(4)]


@dataclass
class Blocks(FixedBlocks):
    """All experts but 7; a row's result is the row times the sum of its weights."""

    compute_dtype: str = "float32"
    factor: float = 1.0
    error: Exception | None = None
    go: Event = field(default_factory=Event)
    asked: list[tuple[int, bool, list[int]]] = field(default_factory=list)

    def owned(self, layer: int) -> Any:
        return np.arange(7)

    def compute(
        self, layer: int, mode: int, rows: Any, offsets: Any, ids: Any, weights: Any, precise: bool
    ) -> Any:
        assert self.go.wait(30)
        if self.error:
            raise self.error
        self.asked.append((layer, precise, ids.tolist()))
        if mode:
            return np.repeat(rows, np.diff(offsets), axis=0) * np.float32(self.factor)
        return self.factor * rows * np.add.reduceat(weights, offsets[:-1])[:, None]


class NativeBlocks(Blocks):
    """Real experts: what comes in single rows is computed without Python, as `compute` would."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__(factor=factor)
        self.go.set()
        rng = np.random.default_rng(3)
        self.hidden = hidden(1)
        up, down = rng.normal(size=(2, 7, 8 * self.hidden)).astype(np.float32)
        self._up = kernels.Matrix(up.reshape(7, 8, -1), mode="plain", cols=self.hidden)
        down *= np.float32(factor)
        self._down = kernels.Matrix(down.reshape(7, -1, 8), mode="plain", cols=8)

    def native(self, layer: int) -> object:
        slots = np.array([*range(7), 2**32 - 1], np.uint32)
        return kernels.experts(None, self._up, self._down, "relu2", (), slots)

    def compute(
        self, layer: int, mode: int, rows: Any, offsets: Any, ids: Any, weights: Any, precise: bool
    ) -> Any:
        self.asked.append((layer, precise, ids.tolist()))
        out = np.empty((len(ids) if mode else len(rows), self.hidden), np.float32)
        scores = None if mode else np.array(weights)
        kernels.ffn(
            None, self._up, self._down, "relu2", (), rows, offsets.astype(np.uint32),
            ids.astype(np.uint32), scores, out, kernels.F32,
        )  # fmt: skip
        return out


@contextmanager
def serving(blocks: Blocks, native: bool = True) -> Iterator[tuple[DriverLink, Links]]:
    """A greeted link to a node with these blocks."""
    blocks.go.set()
    counters = Counters()
    computer = Computer("a", blocks, SHAPE, counters)
    links = Links(welcome(), "made_up", computer, counters, hidden, LIMITS)
    # TCP, whose segments a test can cut.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    assert links.reserve() is None
    served = links.start(theirs, "driver x")
    assert served is not None
    if not native:
        for served_link in links._links:
            served_link._single = None
    connection = DriverConnection(hidden)
    link = DriverLink(FrameStream[DriverEvent](ours, connection, "node"), connection)
    try:
        link.send(connection.hello(hello()))
        assert isinstance(link.receive(), Welcome)
        yield link, links
    finally:
        blocks.go.set()
        link.stream.close()
        served.result(30)


def singles(links: Links) -> list[Single]:
    return [link._single for link in links._links if link._single is not None]


def mixed(dtype: WireDType) -> list[Dispatch]:
    """Dispatches of one row, of several forms and now and then of more rows."""
    made = []
    for layer in (1, 2, 1, 2, 1):
        for precise in (False, True):
            made.append(dispatch((3,), layer=layer, dtype=dtype, precise=precise))
        made.append(dispatch((2, 1), layer=layer, dtype=dtype))
        made.append(dispatch((1,), layer=layer, dtype=dtype))
    made.append(dispatch((2,), mode=ReplyMode.EXACT, dtype=WireDType.F32))
    made.append(dispatch((5,), layer=1, dtype=dtype))
    return made


@pytest.mark.parametrize("dtype", list(WireDType))
def test_the_bits_of_the_stream(dtype: WireDType) -> None:
    """Blocks are asked the same, and replies have the same bits, natively or not."""
    found = []
    for native in (True, False):
        blocks = Blocks(factor=1 / 3)
        with serving(blocks, native) as (link, links):
            replies = [link.ask(asked) for asked in mixed(dtype)]
            assert all(isinstance(reply, Reply) for reply in replies)
            assert bool(singles(links)) is native
            data = [
                reply.data.tobytes()
                for asked in mixed(dtype)
                if isinstance(reply := link.ask(asked), Reply)
            ]
        counters = links.counters
        histograms = sum(counters.queue.counts), sum(counters.compute.counts)
        assert histograms == (counters.dispatches, counters.dispatches)
        found.append((blocks.asked, data, counters.dispatches, counters.rows, counters.pairs))
        assert links.traffic() == (link.stream.bytes_sent, link.stream.bytes_received)
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", list(WireDType))
def test_the_bits_of_python(dtype: WireDType) -> None:
    """Experts asked by native code give the bits that they give to Python, and all is counted."""
    found = []
    for native in (True, False):
        blocks = NativeBlocks()
        with serving(blocks, native) as (link, links):
            replies = [link.ask(asked) for asked in mixed(dtype) * 2]
            data = [reply.data.tobytes() for reply in replies if isinstance(reply, Reply)]
            assert len(data) == len(replies)
        counters = links.counters
        assert sum(counters.compute.counts) == counters.dispatches == len(data)
        assert (len(blocks.asked) < len(data)) is native
        found.append((data, counters.dispatches, counters.rows, counters.pairs))
        assert links.traffic() == (link.stream.bytes_sent, link.stream.bytes_received)
    assert found[0] == found[1]


def test_an_epoch_is_carried_by_native_replies() -> None:
    """A new epoch stands in the next reply, though native code serves row after row."""
    with serving(NativeBlocks()) as (link, links):
        asked = dispatch((3,), dtype=WireDType.F32)
        for epoch in (3, 4, 9):
            links.announce(replace(welcome(), epoch=epoch))
            for _ in range(3):
                assert isinstance(link.ask(asked), Reply)
            assert link.connection.epoch == epoch
            other = dispatch((3,), layer=epoch % 4, dtype=WireDType.F16)  # a form learned meanwhile
            assert isinstance(link.ask(other), Reply)


def test_refusals_of_native_experts() -> None:
    """What native code cannot answer is refused with the sentences of Python."""
    with serving(NativeBlocks(factor=1e6)) as (link, links):
        asked = dispatch((3,), dtype=WireDType.F32)
        assert isinstance(link.ask(asked), Reply) and isinstance(link.ask(asked), Reply)
        missing = replace(asked, ids=np.array([0, 7, 1], np.uint16))
        answer = link.ask(missing)
        assert isinstance(answer, ErrorReply) and "block (1, 7)" in answer.message
        narrow = dispatch((3,), dtype=WireDType.F16)
        for _ in range(2):
            answer = link.ask(narrow)
            assert isinstance(answer, ErrorReply) and "f16 cannot carry" in answer.message
            assert isinstance(link.ask(asked), Reply)
        # A form that was never answered is not known: this one has been.
        zero = replace(narrow, weights=np.zeros(3, np.float32))
        assert isinstance(link.ask(zero), Reply)
        answer = link.ask(narrow)
        assert isinstance(answer, ErrorReply) and "f16 cannot carry" in answer.message
        assert isinstance(link.ask(asked), Reply)
        assert links.drain("leaving", 20) == 0
        assert "leaving" in str(link.receive())


def test_pings_and_pieces() -> None:
    """A ping between, a frame in pieces, and two frames at once are all met."""
    with serving(Blocks()) as (link, links):
        asked = dispatch((3,))
        for _ in range(2):
            assert isinstance(link.ask(asked), Reply)
        link.send(link.connection.ping())
        assert isinstance(link.receive(), Pong)
        assert isinstance(link.ask(asked), Reply)
        whole = b"".join(link.connection.dispatch(asked))
        for cut in (whole[:10], whole[10:40], whole[40:]):
            link.send([cut])
        assert isinstance(link.receive(), Reply)
        two = b"".join([*link.connection.dispatch(asked), *link.connection.dispatch(asked)])
        link.send([two])
        assert isinstance(link.receive(), Reply) and isinstance(link.receive(), Reply)
        assert isinstance(link.ask(asked), Reply)
        assert singles(links)[0]._lane[0] == link.connection.sequence


def test_refusals() -> None:
    """What cannot be computed is refused with its sentence, and the link goes on."""
    blocks = Blocks()
    with serving(blocks) as (link, _):
        asked = dispatch((3,), dtype=WireDType.F16)
        assert isinstance(link.ask(asked), Reply)
        bad = replace(asked, rows=np.full_like(asked.rows, np.nan))
        nan = replace(asked, weights=np.array([1, np.nan, 1], np.float32))
        missing = replace(asked, ids=np.array([0, 7, 1], np.uint16))
        beyond = replace(asked, ids=np.array([0, 1, 65535], np.uint16))
        for wrong, code, words in (
            (bad, ErrorCode.BAD_VALUES, "not finite"),
            (nan, ErrorCode.BAD_VALUES, "not finite"),
            (missing, ErrorCode.NOT_OWNED, "block (1, 7)"),
            (beyond, ErrorCode.NOT_OWNED, "no expert 65535"),
        ):
            answer = link.ask(wrong)
            assert isinstance(answer, ErrorReply) and answer.code is code
            assert words in answer.message
            assert isinstance(link.ask(asked), Reply)
        blocks.factor = 1e6
        answer = link.ask(asked)
        assert isinstance(answer, ErrorReply) and "f16 cannot carry" in answer.message
        blocks.factor, blocks.error = 1.0, RuntimeError("broken")
        answer = link.ask(asked)
        assert isinstance(answer, ErrorReply) and answer.code is ErrorCode.INTERNAL
        blocks.error = None
        assert isinstance(link.ask(asked), Reply)


def test_damage_ends_the_link() -> None:
    """A frame whose bytes were changed on the way is refused as ever."""
    with serving(Blocks()) as (link, _):
        asked = dispatch((3,))
        assert isinstance(link.ask(asked), Reply)
        frame = bytearray(b"".join(link.connection.dispatch(asked)))
        frame[40] ^= 1
        link.send([bytes(frame)])
        answer = link.receive()
        assert isinstance(answer, ErrorReply) and answer.code is ErrorCode.PROTOCOL
        assert link.connection.closed


def test_working_is_said_meanwhile() -> None:
    """A driver hears of a dispatch that takes long, with that dispatch's number."""
    blocks = Blocks()
    with serving(blocks) as (link, _):
        asked = dispatch((3,))
        for _ in range(2):
            assert isinstance(link.ask(asked), Reply)
        blocks.go.clear()
        link.send(link.connection.dispatch(asked))
        assert isinstance(link.stream.receive(20), Working)
        blocks.go.set()
        assert isinstance(link.receive(), Reply)


def test_a_drained_node_says_goodbye_after_its_dispatch() -> None:
    """Draining waits for the dispatch at hand, whose reply still comes."""
    blocks = Blocks()
    with serving(blocks) as (link, links):
        asked = dispatch((3,))
        for _ in range(2):
            assert isinstance(link.ask(asked), Reply)
        link.send(link.connection.dispatch(asked))
        assert isinstance(link.receive(), Reply)
        assert links.drain("leaving", 20) == 0
        assert "leaving" in str(link.receive())


def test_nothing_is_left_behind() -> None:
    """What a link's thread has allocated is as much after many dispatches as after a few."""
    ours = [tracemalloc.Filter(True, f"*/{part}/*") for part in ("expert_node", "net")]
    with serving(Blocks()) as (link, _):
        asked, sizes = dispatch((3,)), []
        tracemalloc.start()
        try:
            for _ in range(4):
                for _ in range(50):
                    link.ask(asked)
                traces = tracemalloc.take_snapshot().filter_traces(ours).traces
                sizes.append(sum(trace.size for trace in traces))
        finally:
            tracemalloc.stop()
    assert abs(sizes[-1] - sizes[1]) < 4096

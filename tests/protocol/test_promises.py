"""What holds for whole links: any garbage, any split, any damage, and what a token costs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_network.errors import RemoteProtocolError
from expert_protocol.connection import DriverConnection, NodeConnection
from expert_protocol.frames import Dispatch, Goodbye, Reply, ReplyMode, WireDType
from expert_protocol.header import HEADER_SIZE, LIMITS, Buffer
from expert_protocol.states import State
from tests.support.wire import (
    KINDS_OF_ROWS,
    dispatch,
    events,
    facts,
    feed,
    greeted,
    hello,
    hidden,
    reply_to,
    welcome,
)

Connection = DriverConnection | NodeConnection


def waiting_driver() -> tuple[Connection, bytes]:
    """A driver that is owed a reply, and that reply after a WORKING."""
    driver, node = greeted()
    asked = dispatch((2, 1))
    events(node, driver.dispatch(asked))
    return driver, b"".join([*node.working(), *node.reply(reply_to(asked))])


def idle_node() -> tuple[Connection, bytes]:
    """A node, and a dispatch and a goodbye that come."""
    driver, node = greeted()
    return node, b"".join([*driver.dispatch(dispatch((2, 1))), *driver.goodbye("done")])


def fresh_node() -> tuple[Connection, bytes]:
    """A node that knows nothing yet, and a HELLO."""
    return NodeConnection(hidden), b"".join(DriverConnection(hidden).hello(hello()))


def greeting_driver() -> tuple[Connection, bytes]:
    """A driver that said HELLO, and the WELCOME with a goodbye behind it."""
    driver, node = DriverConnection(hidden), NodeConnection(hidden)
    events(node, driver.hello(hello()))
    return driver, b"".join([*node.welcome(welcome()), *node.goodbye("draining")])


SCENES = [waiting_driver, idle_node, fresh_node, greeting_driver]
Scene = Callable[[], tuple[Connection, bytes]]
scenes = st.sampled_from(SCENES)


def survive(end: Connection, data: bytes) -> list[Any] | None:
    """The events in `data`, None if it was refused. Anything but a refusal is a failed promise."""
    try:
        return feed(end, bytearray(data))
    except RemoteProtocolError:
        assert end.state is State.FAILED and end.needs == 0
        return None


@given(scenes, st.binary(max_size=200))
def test_any_garbage(scene: Scene, data: bytes) -> None:
    """Any garbage is parsed or a RemoteProtocolError, nothing else."""
    end, _ = scene()
    survive(end, data)


@given(scenes, st.binary(max_size=100), st.integers(4, 31))
def test_garbage_that_begins_well(scene: Scene, data: bytes, kept: int) -> None:
    """The same behind the beginning of a right frame, where more of the code is reached."""
    end, right = scene()
    survive(end, right[:kept] + data)


@given(scenes, st.integers(0, 400), st.integers(0, 255), st.data())
def test_needs_is_always_bounded(scene: Scene, at: int, byte: int, data: st.DataObject) -> None:
    """Whatever a header says, no more is asked for than its kind's limit."""
    end, right = scene()
    changed = bytearray(right)
    changed[at % HEADER_SIZE] = byte
    try:
        end.feed(bytes(changed[:HEADER_SIZE]))
    except RemoteProtocolError:
        return
    assert end.needs <= max(LIMITS.values())


@pytest.mark.parametrize("scene", SCENES)
def test_any_flipped_bit_is_caught(scene: Scene) -> None:
    """No bit of a frame can flip and the frame still be taken for a good one."""
    end, right = scene()
    right_events = [facts(event) for event in feed(end, bytearray(right))]
    assert len(right_events) >= 1
    for at in range(8 * len(right)):
        end, right = scene()
        damaged = bytearray(right)
        damaged[at // 8] ^= 1 << at % 8
        # A length that grew waits for bytes that do not come; the stream's deadline ends that.
        found = survive(end, bytes(damaged))
        if found is not None:
            assert [facts(event) for event in found] == right_events[: len(found)]
            assert len(found) < len(right_events)


@settings(max_examples=200)
@given(scenes, st.lists(st.integers(0, 300), max_size=20))
def test_any_split_gives_the_same_events(scene: Scene, cuts: list[int]) -> None:
    """However the bytes are cut, the same events come out."""
    end, right = scene()
    whole = [facts(event) for event in feed(end, bytearray(right))]
    end, right = scene()
    edges = sorted({0, len(right), *(cut % len(right) for cut in cuts)})
    pending, found = bytearray(), []
    for start, stop in pairwise(edges):
        pending += right[start:stop]
        found += [facts(event) for event in feed(end, pending)]
    assert found == whole and not pending


@given(
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    form=st.sampled_from(KINDS_OF_ROWS),
    epoch=st.integers(0, 2**32 - 1),
    precise=st.booleans(),
    adopt=st.booleans(),
    times=st.integers(1, 4),
)
def test_links_round_trip(times: int, form: tuple[ReplyMode, WireDType], **fields: Any) -> None:
    """Dispatches and replies of every shape pass a link, one after the other, bit by bit."""
    driver, node = greeted()
    for _ in range(times):
        asked = dispatch(mode=form[0], dtype=form[1], **fields)
        (got,) = events(node, driver.dispatch(asked))
        assert facts(got) == facts(asked)
        answer = reply_to(asked)
        assert [facts(event) for event in events(driver, node.reply(answer))] == [facts(answer)]
    assert events(node, driver.goodbye("done")) == [Goodbye("done")]


def size(frame: list[Buffer]) -> int:
    return sum(memoryview(part).nbytes for part in frame)


@pytest.mark.parametrize(
    ("dtype", "expected"), [(WireDType.BF16, 265_472), (WireDType.INT8, 138_496)]
)
def test_traffic_of_a_token(dtype: WireDType, expected: int) -> None:
    """OLMoE: 16 layers of 2048, top-8 over two nodes, is at most 0.27 MB a token in bf16."""
    width, total = 2048, 0
    for _node in range(2):
        driver, node = greeted(lambda layer: width)
        for layer in range(16):
            asked = Dispatch(
                layer,
                0,
                ReplyMode.SUM,
                dtype,
                np.zeros((1, dtype.columns(width)), dtype.raw),
                np.array([0, 4], np.uint32),
                np.zeros(4, np.uint16),
                np.zeros(4, np.float32),
            )
            frame = driver.dispatch(asked)
            events(node, frame)
            answer = node.reply(Reply(ReplyMode.SUM, dtype, 1, 1, asked.rows))
            events(driver, answer)
            total += size(frame) + size(answer)
    assert total == expected <= 270_000

"""expert_protocol.connection"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from expert_network.errors import LocalProtocolError, RemoteProtocolError
from expert_protocol import connection as module
from expert_protocol.connection import DriverConnection, NodeConnection
from expert_protocol.frames import (
    Dispatch,
    ErrorReply,
    Goodbye,
    Hello,
    Ping,
    Pong,
    Reply,
    ReplyMode,
    Welcome,
    WireDType,
    Working,
    encode_dispatch,
    encode_error,
    encode_goodbye,
    encode_hello,
    encode_ping,
    encode_pong,
    encode_reply,
    encode_welcome,
    encode_working,
)
from expert_protocol.header import (
    MAX_OUTSTANDING,
    Buffer,
    ErrorCode,
    Kind,
    decode_header,
    encode_frame,
)
from expert_protocol.states import DRIVER_SENDS, FATAL, NODE_SENDS, State
from tests.support.wire import dispatch, events, facts, greeted, hello, hidden, reply_to, welcome


def test_greeting() -> None:
    """HELLO and WELCOME arrive as they were sent, and both ends are idle."""
    driver, node = DriverConnection(hidden), NodeConnection(hidden)
    assert events(node, driver.hello(hello())) == [hello()]
    assert events(driver, node.welcome(welcome())) == [welcome()]
    assert driver.state is node.state is State.IDLE


def test_token_loop() -> None:
    """Dispatches and replies alternate, with WORKING in between and sequence numbers that rise."""
    driver, node = greeted()
    for sequence in (1, 2, 3):
        asked = dispatch((1, 2), layer=sequence)
        frame = driver.dispatch(asked)
        assert decode_header(frame[0]).sequence == sequence
        (got,) = events(node, frame)
        assert facts(got) == facts(asked)
        assert events(driver, node.working()) == [Working()]
        (answer,) = events(driver, node.reply(reply_to(asked)))
        assert facts(answer) == facts(reply_to(asked))
    assert driver.state is node.state is State.IDLE


def test_needs_follows_the_header() -> None:
    """`needs` is 32, then the checked payload length, then 32 again."""
    driver, node = greeted()
    frame = driver.dispatch(dispatch())
    payload = b"".join(frame[1:])
    assert node.needs == 32
    assert node.feed(frame[0]) is None
    assert node.needs == len(payload)
    assert isinstance(node.feed(payload), Dispatch)
    assert node.needs == 32


def test_ping() -> None:
    """A ping is answered and takes a sequence number of its own."""
    driver, node = greeted()
    assert events(node, driver.ping()) == [Ping()]
    assert events(driver, node.pong()) == [Pong()]
    assert decode_header(driver.dispatch(dispatch())[0]).sequence == 2


def test_sequence_numbers_wrap_past_zero() -> None:
    """After 2**32 - 1 comes 1: 0 means "no request"."""
    driver, node = greeted()
    driver._sequence = node._sequence = 2**32 - 2
    for expected in (2**32 - 1, 1):
        frame = driver.ping()
        assert decode_header(frame[0]).sequence == expected
        events(node, frame)
        events(driver, node.pong())


@pytest.mark.parametrize("code", [code for code in ErrorCode if code not in FATAL])
def test_a_refused_dispatch_leaves_the_link_usable(code: ErrorCode) -> None:
    """An ERROR to a dispatch is an event, and the next dispatch goes through."""
    driver, node = greeted()
    events(node, driver.dispatch(dispatch()))
    assert events(driver, node.error(code, "no")) == [ErrorReply(code, "no")]
    asked = dispatch()
    events(node, driver.dispatch(asked))
    assert len(events(driver, node.reply(reply_to(asked)))) == 1


@pytest.mark.parametrize("code", sorted(FATAL))
def test_a_fatal_error_closes_the_link(code: ErrorCode) -> None:
    """PROTOCOL, VERSION and TOO_LARGE close the link even in answer to a dispatch."""
    driver, node = greeted()
    events(node, driver.dispatch(dispatch()))
    assert events(driver, node.error(code, "no")) == [ErrorReply(code, "no")]
    assert driver.closed and node.closed
    assert driver.needs == node.needs == 0


@pytest.mark.parametrize("code", [ErrorCode.MODEL, ErrorCode.VERSION, ErrorCode.BUSY])
def test_a_refused_hello_closes_the_link(code: ErrorCode) -> None:
    """The node's code looks into the HELLO; its refusal reaches the driver, and both are closed."""
    driver, node = DriverConnection(hidden), NodeConnection(hidden)
    events(node, driver.hello(hello()))
    assert events(driver, node.error(code, "no")) == [ErrorReply(code, "no")]
    assert driver.closed and node.closed


def test_an_error_while_idle_closes_the_link() -> None:
    """An unsolicited ERROR is an event, about the link and its last."""
    driver, node = greeted()
    assert events(driver, node.error(ErrorCode.DRAINING, "bye")) == [
        ErrorReply(ErrorCode.DRAINING, "bye")
    ]
    assert driver.closed


def test_an_error_about_the_link_overtakes_a_dispatch() -> None:
    """A node that could not read the dispatch answers with sequence 0; the driver takes it."""
    driver, node = greeted()
    frame = driver.dispatch(dispatch())
    with pytest.raises(RemoteProtocolError) as caught:
        events(node, [b"NOPE" + bytes(frame[0])[4:], *frame[1:]])
    (event,) = events(driver, node.refuse(caught.value))
    assert event.code is ErrorCode.PROTOCOL and "4e 4f 50 45" in event.message
    assert driver.closed and node.closed


@pytest.mark.parametrize("busy", [False, True])
def test_goodbye_from_the_node(busy: bool) -> None:
    """A GOODBYE reaches the driver idle or waiting; what it waited for will not come."""
    driver, node = greeted()
    bye = node.goodbye("draining")
    if busy:
        driver.dispatch(dispatch())
    assert events(driver, bye) == [Goodbye("draining")]
    assert driver.closed and node.closed


def test_goodbye_from_the_driver() -> None:
    """A driver may leave while its dispatch is computed."""
    driver, node = greeted()
    events(node, driver.dispatch(dispatch()))
    bye = driver.goodbye("stopped")
    assert events(node, bye) == [Goodbye("stopped")]
    assert node.closed


# Every cell of both tables

Calls = dict[Kind, Callable[[Any], list[Buffer]]]
SENDS: Calls = {
    Kind.HELLO: lambda end: end.hello(hello()),
    Kind.WELCOME: lambda end: end.welcome(welcome()),
    Kind.DISPATCH: lambda end: end.dispatch(dispatch()),
    Kind.REPLY: lambda end: end.reply(reply_to(dispatch())),
    Kind.ERROR: lambda end: end.error(ErrorCode.BUSY, "no"),
    Kind.WORKING: lambda end: end.working(),
    Kind.GOODBYE: lambda end: end.goodbye("bye"),
}
DRIVER_CALLS: Calls = {
    **{kind: SENDS[kind] for kind in (Kind.HELLO, Kind.DISPATCH, Kind.GOODBYE)},
    Kind.PING: lambda end: end.ping(),
}
NODE_CALLS: Calls = {
    **{kind: SENDS[kind] for kind in (Kind.WELCOME, Kind.REPLY, Kind.ERROR, Kind.WORKING)},
    Kind.GOODBYE: SENDS[Kind.GOODBYE],
    Kind.PING: lambda end: end.pong(),
}


def bring_to(state: State) -> tuple[DriverConnection, NodeConnection]:
    """Both ends of a link in `state`."""
    if state is State.FRESH:
        return DriverConnection(hidden), NodeConnection(hidden)
    if state is State.GREETING:
        driver, node = bring_to(State.FRESH)
        events(node, driver.hello(hello()))
        return driver, node
    driver, node = greeted()
    match state:
        case State.WAITING:
            events(node, driver.dispatch(dispatch()))
        case State.PINGED:
            events(node, driver.ping())
        case State.CLOSED:
            events(node, driver.goodbye("bye"))
        case State.FAILED:
            for end in (driver, node):
                with pytest.raises(RemoteProtocolError):
                    end.feed(bytes(32))
    assert driver.state == node.state == state or state is State.CLOSED
    return driver, node


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("state", State)
def test_driver_sends_what_its_table_says(state: State, kind: Kind) -> None:
    """A call goes through exactly when its cell is there; otherwise nothing changes."""
    driver, node = bring_to(state)
    after = DRIVER_SENDS[state].get(kind)
    if kind not in DRIVER_CALLS:
        assert after is None
    elif after is None:
        with pytest.raises(LocalProtocolError, match=f"{kind.name}|PING"):
            DRIVER_CALLS[kind](driver)
        assert driver.state is state
    else:
        frame = DRIVER_CALLS[kind](driver)
        assert driver.state is after
        if not node.closed:
            events(node, frame)
            assert node.state is after


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("state", State)
def test_node_sends_what_its_table_says(state: State, kind: Kind) -> None:
    """A call goes through exactly when its cell is there; otherwise nothing changes."""
    driver, node = bring_to(state)
    after = NODE_SENDS[state].get(kind)
    if kind not in NODE_CALLS:
        assert after is None
    elif after is None:
        with pytest.raises(LocalProtocolError, match=f"{kind.name}|PING"):
            NODE_CALLS[kind](node)
        assert node.state is state
    else:
        frame = NODE_CALLS[kind](node)
        assert node.state is after
        if not driver.closed:
            events(driver, frame)
            assert driver.state is after


FRAMES: dict[str, list[Buffer]] = {
    "HELLO": encode_frame(Kind.HELLO, (encode_hello(hello()),)),
    "WELCOME": encode_frame(Kind.WELCOME, (encode_welcome(welcome()),)),
    "DISPATCH": encode_dispatch(dispatch(), 1),
    "REPLY": encode_reply(reply_to(dispatch()), decode_header(encode_dispatch(dispatch(), 1)[0])),
    "ERROR": encode_error(ErrorReply(ErrorCode.BUSY, "no"), 0),
    "PING": encode_ping(1),
    "PONG": encode_pong(1),
    "WORKING": encode_working(1),
    "GOODBYE": encode_goodbye(Goodbye("bye")),
}
OPEN_STATES = [state for state in State if state < State.CLOSED]


@pytest.mark.parametrize("name", FRAMES)
@pytest.mark.parametrize("state", OPEN_STATES)
@pytest.mark.parametrize("side", ["driver", "node"])
def test_receives_what_the_other_table_says(side: str, state: State, name: str) -> None:
    """A well-formed frame that has no cell is refused, and the end is closed for good."""
    driver, node = bring_to(state)
    end, table = (driver, NODE_SENDS) if side == "driver" else (node, DRIVER_SENDS)
    kind = Kind.PING if name == "PONG" else Kind[name]
    allowed = kind in table[state] and name != ("PING" if side == "driver" else "PONG")
    due = encode_dispatch(dispatch(), 2 if state is State.WAITING else 1)
    frame = due if name == "DISPATCH" else FRAMES[name]
    if allowed:
        assert len(events(end, frame)) == 1
    else:
        with pytest.raises(RemoteProtocolError, match=kind.name):
            events(end, frame)
        assert end.state is State.FAILED and end.needs == 0
        with pytest.raises(LocalProtocolError):
            end.feed(FRAMES["GOODBYE"][0])


def test_the_tables_name_every_state() -> None:
    """No state is without a row."""
    assert set(DRIVER_SENDS) == set(NODE_SENDS) == set(State)


# Sequence numbers and what must be repeated


@pytest.mark.parametrize("name", ["REPLY", "WORKING", "ERROR"])
@pytest.mark.parametrize("sequence", [0, 1, 3, 2**32 - 1])
def test_only_the_outstanding_dispatch_is_answered(name: str, sequence: int) -> None:
    """A late or early answer can never be taken for the outstanding one's."""
    driver, node = greeted()
    events(node, driver.dispatch(dispatch()))
    events(driver, node.reply(reply_to(dispatch())))
    driver.dispatch(dispatch())  # sequence 2
    frames = {
        "REPLY": encode_reply(
            reply_to(dispatch()), decode_header(encode_dispatch(dispatch(), sequence)[0])
        ),
        "WORKING": encode_working(sequence),
        "ERROR": encode_error(ErrorReply(ErrorCode.BUSY, "no"), sequence),
    }
    if name == "ERROR" and sequence == 0:
        assert len(events(driver, frames[name])) == 1 and driver.closed
        return
    with pytest.raises(RemoteProtocolError, match=f"{sequence}; 2 is the next due"):
        events(driver, frames[name])


@pytest.mark.parametrize(
    "asked",
    [
        dispatch(layer=2),
        dispatch(epoch=2),
        dispatch(dtype=WireDType.F16),
        dispatch((1, 1)),
        dispatch(mode=ReplyMode.EXACT),
        dispatch(width=4),
    ],
)
def test_a_reply_repeats_its_dispatch(asked: Dispatch) -> None:
    """Layer, dtype, mode, rows and size are the dispatch's, and its epoch is no older."""
    driver, node = greeted()
    events(node, driver.dispatch(dispatch()))
    request = decode_header(encode_dispatch(asked, 1)[0])
    with pytest.raises(RemoteProtocolError, match="REPLY"):
        driver.feed(encode_reply(reply_to(asked), request)[0])


def test_a_later_epoch_is_told() -> None:
    """WELCOME, REPLY and PONG carry the node's epoch, and the driver keeps the latest."""
    driver, node = greeted()
    assert driver.epoch == 3
    node.epoch = 4
    events(node, driver.dispatch(dispatch(epoch=5)))
    events(driver, node.reply(reply_to(dispatch(epoch=5))))
    assert driver.epoch == 3  # the dispatch was of a later one: nothing to learn
    events(node, driver.dispatch(dispatch()))
    events(driver, node.reply(reply_to(dispatch())))
    assert driver.epoch == 4
    node.epoch = 6
    events(node, driver.ping())
    events(driver, node.pong())
    assert driver.epoch == 6


def test_an_exact_reply_has_a_row_per_pair() -> None:
    """In exact mode the reply's size follows the pairs, not the rows."""
    driver, node = greeted(exact=True)
    asked = dispatch((2, 3), mode=ReplyMode.EXACT, dtype=WireDType.F32)
    events(node, driver.dispatch(asked))
    with pytest.raises(LocalProtocolError, match=r"\(5, 8\)"):
        node.reply(replace(reply_to(asked), data=np.zeros((2, 8), np.float32)))
    (answer,) = events(driver, node.reply(reply_to(asked)))
    assert answer.data.shape == (5, 8)


@pytest.mark.parametrize("sequence", [0, 1, 3])
def test_a_dispatch_out_of_sequence_is_refused(sequence: int) -> None:
    """A node takes 1, 2, 3 ... and nothing twice."""
    driver, node = greeted()
    events(node, driver.ping())
    events(driver, node.pong())
    with pytest.raises(RemoteProtocolError, match="where 2 is due"):
        events(node, encode_dispatch(dispatch(), sequence))


# Several dispatches outstanding


def test_dispatches_are_answered_in_their_order() -> None:
    """REPLY, WORKING and ERROR are about the oldest dispatch, and the link waits for the last."""
    driver, node = greeted()
    asked = [dispatch((1,) * rows, layer=rows) for rows in (1, 2, 3)]
    for each in asked:
        events(node, driver.dispatch(each))
    assert driver.outstanding == node.outstanding == 3
    (answer,) = events(driver, node.reply(reply_to(asked[0])))
    assert facts(answer) == facts(reply_to(asked[0]))
    working = node.working()
    assert decode_header(working[0]).sequence == 2
    assert events(driver, working) == [Working()]
    assert len(events(driver, node.error(ErrorCode.BAD_VALUES, "no"))) == 1
    assert driver.outstanding == node.outstanding == 1
    with pytest.raises(LocalProtocolError, match="due"):
        node.reply(reply_to(asked[0]))
    (answer,) = events(driver, node.reply(reply_to(asked[2])))
    assert facts(answer) == facts(reply_to(asked[2]))
    assert driver.state is node.state is State.IDLE
    assert driver.outstanding == node.outstanding == 0


def test_a_dispatch_may_cross_a_reply() -> None:
    """The driver sends its second while the first one's reply is under way."""
    driver, node = greeted()
    first, second = dispatch((1,)), dispatch((2, 1))
    events(node, driver.dispatch(first))
    answer, frame = node.reply(reply_to(first)), driver.dispatch(second)
    assert (driver.outstanding, node.outstanding) == (2, 0)
    events(driver, answer)
    events(node, frame)
    assert driver.state is node.state is State.WAITING
    (got,) = events(driver, node.reply(reply_to(second)))
    assert facts(got) == facts(reply_to(second))


def test_a_reply_out_of_order_is_refused() -> None:
    """The second dispatch's reply is not taken for the first one's, nor before it."""
    driver, node = greeted()
    for _ in range(2):
        events(node, driver.dispatch(dispatch()))
    early = encode_reply(reply_to(dispatch()), decode_header(encode_dispatch(dispatch(), 2)[0]))
    with pytest.raises(RemoteProtocolError, match="answers 2; 1 is the next due"):
        driver.feed(early[0])


def test_dispatches_beyond_the_limit() -> None:
    """The ninth unanswered dispatch is not sent, and refused if it comes."""
    driver, node = greeted()
    for _ in range(MAX_OUTSTANDING):
        events(node, driver.dispatch(dispatch()))
    with pytest.raises(LocalProtocolError, match=str(MAX_OUTSTANDING)):
        driver.dispatch(dispatch())
    assert driver.state is State.WAITING
    with pytest.raises(RemoteProtocolError, match=str(MAX_OUTSTANDING)):
        node.feed(encode_dispatch(dispatch(), MAX_OUTSTANDING + 1)[0])


@pytest.mark.parametrize("precise", [False, True])
def test_precise(precise: bool) -> None:
    """PRECISE arrives as it was sent, and is no part of the reply."""
    driver, node = greeted()
    frame = driver.dispatch(dispatch(precise=precise))
    assert decode_header(frame[0]).flags == precise
    (got,) = events(node, frame)
    assert got.precise is precise
    answer = node.reply(reply_to(got))
    assert decode_header(answer[0]).flags == 0
    assert len(events(driver, answer)) == 1


# Limits that the greeting set


def test_the_node_refuses_more_rows_than_it_said() -> None:
    """max_rows of the WELCOME is checked at the header, as TOO_LARGE."""
    _, node = greeted(node_says=welcome(max_rows=2))
    with pytest.raises(RemoteProtocolError) as caught:
        node.feed(encode_dispatch(dispatch((1, 1, 1)), 1)[0])
    assert caught.value.code == ErrorCode.TOO_LARGE


def test_the_node_refuses_more_bytes_than_it_said() -> None:
    """max_payload of the WELCOME is checked at the header, as TOO_LARGE."""
    _, node = greeted(node_says=welcome(max_payload=100))
    with pytest.raises(RemoteProtocolError) as caught:
        node.feed(encode_dispatch(dispatch((1,) * 6), 1)[0])
    assert caught.value.code == ErrorCode.TOO_LARGE


def test_the_node_refuses_a_dispatch_whose_reply_would_be_too_large() -> None:
    """The reply's size is known at the header, so nothing is computed in vain."""
    _, node = greeted(max_payload=100)
    with pytest.raises(RemoteProtocolError, match="reply") as caught:
        node.feed(encode_dispatch(dispatch((9,), mode=ReplyMode.EXACT), 1)[0])
    assert caught.value.code == ErrorCode.TOO_LARGE


def test_the_node_refuses_an_unknown_layer_and_dtype() -> None:
    """A layer without experts and a dtype it did not offer are refused at the header."""
    for asked, words in ((dispatch(layer=9), "layer 9"), (dispatch(dtype=WireDType.F16), "f16")):
        _, node = greeted(node_says=welcome(dtypes=(WireDType.F32, WireDType.BF16)))
        with pytest.raises(RemoteProtocolError, match=words):
            node.feed(encode_dispatch(asked, 1)[0])


@pytest.mark.parametrize("size", [0, -1, 131073])
def test_a_layer_of_absurd_width_is_refused(size: int) -> None:
    """Whatever the caller's table says, a row has 1 to 131,072 values."""
    _, node = greeted(lambda layer: size)
    with pytest.raises(RemoteProtocolError, match="no experts in layer 1"):
        node.feed(encode_dispatch(dispatch(), 1)[0])


@pytest.mark.parametrize(
    ("node_says", "asked", "words"),
    [
        (welcome(max_rows=1), dispatch((1, 1)), "too many"),
        (welcome(max_payload=40), dispatch((4,)), "too many"),
        (welcome(), dispatch((9,), mode=ReplyMode.EXACT), "too many"),
        (welcome(dtypes=(WireDType.F32,)), dispatch(), "bf16"),
        (welcome(), dispatch(width=4), "4 columns"),
        (welcome(), dispatch(layer=9), "layer 9"),
    ],
)
def test_the_driver_sends_nothing_the_node_would_refuse(
    node_says: Welcome, asked: Dispatch, words: str
) -> None:
    """What the WELCOME rules out is our own mistake, and the link stays as it was."""
    driver, _ = greeted(node_says=node_says, max_payload=120)
    with pytest.raises(LocalProtocolError, match=words):
        driver.dispatch(asked)
    assert driver.state is State.IDLE
    assert decode_header(driver.ping()[0]).sequence == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": ReplyMode.EXACT},
        {"dtype": WireDType.F32, "data": np.zeros((1, 8), np.float32)},
        {"data": np.zeros((2, 8), np.uint16)},
        {"data": np.zeros((1, 7), np.uint16)},
        {"data": np.zeros((1, 8), np.float16)},
    ],
)
def test_the_node_sends_no_reply_but_the_one_due(wrong: dict[str, Any]) -> None:
    """A reply of another mode, dtype or shape is our own mistake; the right one still goes."""
    driver, node = greeted()
    events(node, driver.dispatch(dispatch()))
    reply = reply_to(dispatch())
    with pytest.raises(LocalProtocolError):
        node.reply(replace(reply, **wrong))
    assert isinstance(events(driver, node.reply(reply))[0], Reply)


def test_a_wrong_number_of_bytes_is_our_fault() -> None:
    """feed takes exactly `needs` bytes."""
    driver, node = greeted()
    frame = driver.dispatch(dispatch())
    for data in (b"", bytes(frame[0])[:31], bytes(frame[0]) + b"x"):
        with pytest.raises(LocalProtocolError):
            node.feed(data)
    assert len(events(node, frame)) == 1


def test_another_version_is_answered_so_that_it_is_understood() -> None:
    """A HELLO of version 4 gets an ERROR that names both versions, and any version can read it."""
    node = NodeConnection(hidden)
    head = bytes(FRAMES["HELLO"][0])
    with pytest.raises(RemoteProtocolError) as caught:
        node.feed(head[:4] + b"\x04" + head[5:])
    driver = DriverConnection(hidden)
    driver.hello(hello())
    (event,) = events(driver, node.refuse(caught.value))
    assert event.code is ErrorCode.VERSION
    assert "version 4" in event.message and "version 3" in event.message


@pytest.mark.parametrize("version", [1, 255])
def test_the_error_of_another_version_is_understood(version: int) -> None:
    """An ERROR from a node of another version arrives as an event, with its sentence."""
    driver = DriverConnection(hidden)
    driver.hello(hello())
    payload = (99).to_bytes(2, "little") + b"this node speaks another version"
    head = bytes(encode_frame(Kind.ERROR, (payload,))[0])
    head = head[:4] + bytes([version]) + head[5:28]
    frame = [head + crc32(head + payload).to_bytes(4, "little"), payload]
    (event,) = events(driver, frame)
    assert event == ErrorReply(ErrorCode.VERSION, "this node speaks another version")


def test_the_driver_refuses_with_a_goodbye() -> None:
    """After something that is not the protocol, the node is told why the driver leaves."""
    driver, node = greeted()
    with pytest.raises(RemoteProtocolError) as caught:
        driver.feed(bytes(32))
    assert isinstance(events(node, driver.refuse(caught.value))[0], Goodbye)
    with pytest.raises(LocalProtocolError):
        driver.refuse(caught.value)


def test_events_are_what_the_types_say() -> None:
    """The unions of event types list what can come, so that a match can be complete."""
    assert set(module.DriverEvent.__args__) == {Welcome, Reply, ErrorReply, Pong, Working, Goodbye}
    assert set(module.NodeEvent.__args__) == {Hello, Dispatch, Ping, Goodbye}

"""Decoders of what travels on links: frames, greetings, rows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from expert_driver.chaos.following import Follower
from expert_network.errors import RemoteProtocolError, RosterError
from expert_protocol.connection import DriverConnection, NodeConnection
from expert_protocol.dtypes import RawArray, WireDType
from expert_protocol.frames import (
    ErrorCode,
    ErrorReply,
    Goodbye,
    decode_hello,
    decode_welcome,
    encode_error,
    encode_goodbye,
    encode_hello,
    encode_ping,
    encode_pong,
    encode_reply,
    encode_welcome,
    encode_working,
)
from expert_protocol.header import HEADER_SIZE, Buffer, Kind, decode_header, encode_frame
from expert_roster.roster import Roster
from tests.fuzz.mutation import mutated_frame, mutated_msgpack
from tests.fuzz.target import Target
from tests.support.wire import (
    HIDDEN,
    KINDS_OF_ROWS,
    dispatch,
    feed,
    greeted,
    hello,
    reply_to,
    welcome,
)


def wire_targets() -> list[Target]:
    """All of them."""
    return [*_frames(), *_greetings(), *_rows()]


# Frames


def _joined(buffers: Sequence[Buffer]) -> bytes:
    return b"".join(buffers)


def _framed(kind: Kind, payload: bytes) -> bytes:
    return _joined(encode_frame(kind, [payload]))


_ASKED = [dispatch((2, 1), mode=mode, dtype=dtype) for mode, dtype in KINDS_OF_ROWS]
_DISPATCHES = [_joined(greeted()[0].dispatch(asked)) for asked in _ASKED]
_REPLIES = [
    _joined(encode_reply(reply_to(asked), decode_header(sent[:HEADER_SIZE])))
    for asked, sent in zip(_ASKED, _DISPATCHES, strict=True)
]
_ERRORS = [_joined(encode_error(ErrorReply(code, "a sentence"), 1)) for code in ErrorCode]
_NOTICES = [
    _joined(buffers)
    for buffers in (
        encode_goodbye(Goodbye("bye")),
        encode_ping(1),
        encode_pong(1),
        encode_working(1),
    )
]
_HELLO, _WELCOME = (
    _framed(Kind.HELLO, encode_hello(hello())),
    _framed(Kind.WELCOME, encode_welcome(welcome())),
)


def _frames() -> list[Target]:
    framed = partial(Target, refused=RemoteProtocolError, mutate=mutated_frame)
    heads = [frame[:HEADER_SIZE] for frame in [*_DISPATCHES, *_REPLIES, *_ERRORS, *_NOTICES]]
    return [
        Target("frame header", _header, heads, RemoteProtocolError),
        framed("DISPATCH", _at_node, _DISPATCHES),
        framed("REPLY", _at_driver, _REPLIES),
        framed("ERROR", _at_driver, _ERRORS),
        framed("notices at a driver", _at_driver, _NOTICES),
        framed("notices at a node", _at_node, _NOTICES),
        framed("HELLO frame", _at_fresh_node, [_HELLO]),
        framed("WELCOME frame", _at_greeting_driver, [_WELCOME]),
        Target(
            "frames in a proxy", _in_proxy, [b"GET / HTTP/1.1\r\n\r\n" + _HELLO + _DISPATCHES[0]]
        ),
    ]


def _header(data: bytes) -> object:
    return decode_header(data[:HEADER_SIZE].ljust(HEADER_SIZE, b"\0"))


def _events(connection: Any, data: bytes) -> None:
    for event in feed(connection, bytearray(data)):
        values = event.rows if hasattr(event, "rows") else getattr(event, "data", None)
        if values is not None:
            _decoded(event.dtype, values)


def _decoded(dtype: WireDType, raw: RawArray) -> None:
    """Finite rows are decoded without any overflow; the others are refused before."""
    if dtype.finite(raw):
        with np.errstate(all="raise", under="ignore"):
            assert np.isfinite(dtype.decode(raw)).all()


def _at_node(data: bytes) -> None:
    _events(greeted()[1], data)


def _at_driver(data: bytes) -> None:
    """A driver that has asked in the reply mode and dtype that the frame states."""
    form = data[18:20]
    driver, _ = greeted()
    driver.dispatch(next((a for a in _ASKED if bytes((a.dtype, a.mode)) == form), _ASKED[0]))
    _events(driver, data)


def _at_fresh_node(data: bytes) -> None:
    _events(NodeConnection(lambda layer: HIDDEN), data)


def _at_greeting_driver(data: bytes) -> None:
    connection = DriverConnection(lambda layer: HIDDEN)
    connection.hello(hello())
    _events(connection, data)


def _in_proxy(data: bytes) -> None:
    follower = Follower()
    half = len(data) // 2
    pieces = [piece for part in (data[:half], data[half:]) for _, piece in follower.feed(part)]
    assert b"".join(pieces) + follower.rest() == data


def _greetings() -> list[Target]:
    packed = partial(Target, refused=RemoteProtocolError, mutate=mutated_msgpack)
    return [
        packed(
            "HELLO", decode_hello, [encode_hello(hello()), encode_hello(hello(peers=("http://a",)))]
        ),
        packed("WELCOME", _welcome, [encode_welcome(welcome())]),
    ]


def _welcome(data: bytes) -> None:
    with suppress(RosterError):
        Roster.from_wire(decode_welcome(data).roster)


# Rows


def _rows() -> list[Target]:
    values = np.linspace(-3, 3, 66, dtype=np.float32).reshape(1, 66)
    return [
        Target(
            f"{dtype.label} rows", partial(_decode_rows, dtype), [dtype.encode(values).tobytes()]
        )
        for dtype in WireDType
    ]


def _decode_rows(dtype: WireDType, data: bytes) -> None:
    whole = len(data) - len(data) % dtype.raw.itemsize
    raw = np.frombuffer(data[:whole], dtype.raw).reshape(1, -1)
    if not raw.size:
        return
    try:
        width = dtype.hidden(raw.shape[1])
    except ValueError:
        return
    if dtype.columns(width) == raw.shape[1]:
        _decoded(dtype, raw)

"""What a proxy knows of a reply: every byte goes on, frames are found, tokens are counted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from expert_driver.chaos.faults import Point
from expert_driver.chaos.following import Follower, TokenClock
from expert_protocol.frames import (
    Goodbye,
    encode_dispatch,
    encode_goodbye,
    encode_hello,
    encode_ping,
)
from expert_protocol.header import Buffer, Header, Kind, decode_header, encode_frame
from tests.support.wire import dispatch, hello

HEAD = b"GET /link HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: expert-link/1\r\n\r\n"
BUFFERS: list[Sequence[Buffer]] = [
    encode_frame(Kind.HELLO, [encode_hello(hello())]),
    encode_dispatch(dispatch(layer=0), 1),
    encode_ping(2),
    encode_dispatch(dispatch((2, 1), layer=3), 3),
    encode_goodbye(Goodbye("bye")),
]
FRAMES = [b"".join(buffers) for buffers in BUFFERS]
STREAM = HEAD * 2 + b"".join(FRAMES)


def cut(data: bytes, at: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(edge, len(data)) for edge in at), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


@given(st.lists(st.integers(0, len(STREAM)), max_size=40))
def test_every_frame_is_found_and_no_byte_lost(edges: list[int]) -> None:
    """However the bytes come: they go on in order, and each frame's header stands at its start."""
    follower = Follower()
    found = [piece for part in cut(STREAM, edges) for piece in follower.feed(part)]
    assert b"".join(data for _, data in found) + follower.rest() == STREAM
    headers = [(header, data) for header, data in found if header is not None]
    assert [data for _, data in headers] == [frame[:32] for frame in FRAMES]
    assert [header.kind for header, _ in headers] == [decode_header(f[:32]).kind for f in FRAMES]


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=10))
def test_strangers_pass_unread(data: bytes, edges: list[int]) -> None:
    """Bytes that are neither requests nor frames go on as they are."""
    follower = Follower()
    found = [piece for part in cut(data, edges) for _, piece in follower.feed(part)]
    assert b"".join(found) + follower.rest() == data


def test_bytes_of_another_protocol_do_not_wait() -> None:
    """A TLS record goes on at once: it never ends like a request's head."""
    record = b"\x16\x03\x01\x02\x00\x01"
    assert list(Follower().feed(record)) == [(None, record)]


def header(layer: int) -> Header:
    return decode_header(encode_dispatch(dispatch(layer=layer), 1)[0])


def test_tokens_are_counted_by_the_last_layer() -> None:
    """Passes over a prompt, side by side or not, are token 0's; so are repeated dispatches."""
    clock = TokenClock(last_layer=3)
    prompt = [0, 1, 0, 2, 1, 2, 3]
    assert [clock.at(header(layer)) for layer in prompt] == [Point(0, layer) for layer in prompt]
    # The second node of a layer, and one that is asked again for what another one did not do.
    tokens = [0, 0, 1, 2, 3, 3, 3, 0, 2, 3]
    expected = [1, 1, 1, 1, 1, 1, 1, 2, 2, 2]
    points = [clock.at(header(layer)) for layer in tokens]
    assert points == [Point(t, n) for t, n in zip(expected, tokens, strict=True)]
    clock.restart()
    assert clock.at(header(2)) == Point(0, 2)


def test_only_dispatches_count() -> None:
    """A greeting or a ping is at no layer."""
    ping = decode_header(encode_ping(1)[0])
    assert ping.kind is Kind.PING and TokenClock(3).at(ping) is None

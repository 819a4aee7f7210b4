"""expert_protocol.notices"""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert_network.errors import RemoteProtocolError
from expert_protocol.header import (
    HEADER_SIZE,
    MAX_ERROR,
    MAX_GOODBYE,
    Buffer,
    ErrorCode,
    Header,
    decode_header,
)
from expert_protocol.notices import (
    ErrorReply,
    Goodbye,
    decode_error,
    decode_goodbye,
    encode_error,
    encode_goodbye,
    encode_ping,
    encode_pong,
    encode_working,
)


def parts(frame: list[Buffer]) -> tuple[Header, bytes]:
    return decode_header(frame[0]), b"".join(frame[1:])


printable = st.text(max_size=200).map(
    lambda text: "".join(char for char in text if char.isprintable())
)


@given(st.sampled_from(ErrorCode), printable, st.integers(0, 2**32 - 1))
def test_error_round_trip(code: ErrorCode, message: str, sequence: int) -> None:
    """A code and a sentence, whatever its letters, arrive as they were sent."""
    header, payload = parts(encode_error(ErrorReply(code, message), sequence))
    assert header.sequence == sequence
    assert decode_error(header, payload) == ErrorReply(code, message)


@given(printable)
def test_goodbye_round_trip(reason: str) -> None:
    """A reason arrives as it was given."""
    header, payload = parts(encode_goodbye(Goodbye(reason)))
    assert header.length == len(payload)
    assert decode_goodbye(payload) == Goodbye(reason)


@given(st.text(), st.sampled_from(["", "x" * MAX_ERROR, "\N{BOMB}" * MAX_ERROR]))
def test_any_text_can_be_sent(text: str, more: str) -> None:
    """Control characters, lone surrogates and endless sentences are made harmless, not raised."""
    header, payload = parts(encode_error(ErrorReply(ErrorCode.INTERNAL, text + more), 0))
    assert header.length <= MAX_ERROR
    assert decode_error(header, payload).message.isprintable()
    header, payload = parts(encode_goodbye(Goodbye(more + text)))
    assert header.length <= MAX_GOODBYE
    assert decode_goodbye(payload).reason.isprintable()


@given(st.binary(max_size=60))
def test_any_bytes(data: bytes) -> None:
    """Garbage is a printable sentence or a RemoteProtocolError, nothing else."""
    header = parts(encode_error(ErrorReply(ErrorCode.BUSY, ""), 0))[0]._replace(length=len(data))
    with suppress(RemoteProtocolError):
        assert decode_error(header, data).message.isprintable()
    with suppress(RemoteProtocolError):
        assert decode_goodbye(data).reason.isprintable()


def test_a_terminal_is_safe_from_a_peer() -> None:
    """Escape sequences in a peer's sentence do not survive decoding."""
    assert decode_goodbye(b"\x1b[2J\r\nhi").reason == "\ufffd[2J\ufffd\ufffdhi"


@pytest.mark.parametrize("payload", [b"", b"\x01", b"\x00\x00no", b"\x0e\x00no", b"\x01\x00\xff"])
def test_refused_errors(payload: bytes) -> None:
    """An ERROR without a whole code, with an unknown one, or not in UTF-8, is refused."""
    header = parts(encode_error(ErrorReply(ErrorCode.BUSY, ""), 0))[0]
    with pytest.raises(RemoteProtocolError):
        decode_error(header._replace(length=len(payload)), payload)


def test_an_unknown_code_of_another_version() -> None:
    """A code that a later version invented reads as VERSION: the sentence is kept."""
    header = parts(encode_error(ErrorReply(ErrorCode.BUSY, ""), 0))[0]
    later = header._replace(version=4, length=5)
    assert decode_error(later, b"\x63\x00new") == ErrorReply(ErrorCode.VERSION, "new")
    assert decode_error(later, b"\x0a\x00new") == ErrorReply(ErrorCode.BUSY, "new")


def test_bare_headers() -> None:
    """PING, its answer and WORKING are 32 bytes, told apart by kind and flag."""
    frames = [encode_ping(7), encode_pong(7), encode_working(7)]
    assert [len(frame) for frame in frames] == [1, 1, 1]
    assert all(len(frame[0]) == HEADER_SIZE for frame in frames)
    headers = [decode_header(frame[0]) for frame in frames]
    assert [(h.kind.name, h.flags, h.sequence) for h in headers] == [
        ("PING", 0, 7),
        ("PING", 1, 7),
        ("WORKING", 0, 7),
    ]

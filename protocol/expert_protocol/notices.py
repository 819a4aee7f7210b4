"""The small frames: ERROR and GOODBYE, which carry a sentence, PING and WORKING, a header alone."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from expert_network.errors import RemoteProtocolError
from expert_protocol.header import (
    MAX_ERROR,
    MAX_GOODBYE,
    PONG_FLAG,
    VERSION,
    Buffer,
    ErrorCode,
    Header,
    Kind,
    encode_frame,
)

_CODE = struct.Struct("<H")
_CODES = {int(code): code for code in ErrorCode}


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """A refusal: a code to act on and a sentence to show."""

    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class Ping:
    """The driver asks whether the node is there."""


@dataclass(frozen=True, slots=True)
class Pong:
    """It is."""


@dataclass(frozen=True, slots=True)
class Working:
    """The node still computes the outstanding dispatch."""


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The sender closes the link, and says why."""

    reason: str


def encode_error(error: ErrorReply, sequence: int) -> list[Buffer]:
    """The frame's buffers; a sentence too long for it is cut."""
    payload = _CODE.pack(error.code) + _cut(error.message, MAX_ERROR - _CODE.size)
    return encode_frame(Kind.ERROR, (payload,), sequence=sequence)


def decode_error(header: Header, payload: memoryview | bytes) -> ErrorReply:
    """Raises RemoteProtocolError for an unknown code of our own version, or a text not UTF-8.

    An unknown code from another version can only mean that versions differ: it reads as VERSION.
    """
    if header.length < _CODE.size:
        raise RemoteProtocolError("an ERROR without a code")
    (number,) = _CODE.unpack_from(payload)
    code = _CODES.get(number)
    if code is None and header.version != VERSION:
        code = ErrorCode.VERSION
    if code is None:
        raise RemoteProtocolError(f"an ERROR with the unknown code {number}")
    return ErrorReply(code, _sentence("ERROR", payload[_CODE.size :]))


def encode_goodbye(goodbye: Goodbye) -> list[Buffer]:
    """The frame's buffers; a reason too long for it is cut."""
    return encode_frame(Kind.GOODBYE, (_cut(goodbye.reason, MAX_GOODBYE),))


def decode_goodbye(payload: memoryview | bytes) -> Goodbye:
    """Raises RemoteProtocolError for a text that is not UTF-8."""
    return Goodbye(_sentence("GOODBYE", payload))


def _printable(text: str) -> str:
    """A peer's words end on a terminal: no control characters, no escape sequences."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def _cut(text: str, limit: int) -> bytes:
    data = _printable(text).encode()
    return data if len(data) <= limit else data[:limit].decode(errors="ignore").encode()


def _sentence(name: str, payload: memoryview | bytes) -> str:
    try:
        return _printable(str(payload, "utf-8"))
    except UnicodeDecodeError as error:
        raise RemoteProtocolError(f"the text of the {name} is not UTF-8") from error


def encode_ping(sequence: int) -> list[Buffer]:
    """The frame's one buffer."""
    return encode_frame(Kind.PING, sequence=sequence)


def encode_pong(sequence: int, epoch: int = 0) -> list[Buffer]:
    """The frame's one buffer: a PING with flag bit 0, and the node's epoch."""
    return encode_frame(Kind.PING, flags=PONG_FLAG, sequence=sequence, epoch=epoch)


def encode_working(sequence: int) -> list[Buffer]:
    """The frame's one buffer."""
    return encode_frame(Kind.WORKING, sequence=sequence)

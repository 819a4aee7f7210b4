"""The 32 bytes that every frame starts with, and the limits of what may follow them.

Little-endian: 0 magic "EXPN" | 4 version u8 | 5 kind u8 | 6 flags u16 | 8 sequence u32 |
12 epoch u32 | 16 layer u16 | 18 dtype u8 | 19 reply mode u8 | 20 rows u16 | 22 reserved u16 |
24 payload length u32 | 28 crc32 u32 over bytes 0..27 and then the payload.

Bytes 0..5 and the whole ERROR frame keep their meaning in every later version, so that two
versions can always tell each other why they part. docs/protocol.md has the rest.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple
from zlib import crc32

from expert_network.errors import LocalProtocolError, RemoteProtocolError
from expert_protocol.dtypes import WireDType

MAGIC = b"EXPN"
#: Raised when a peer of the version before would misread, or refuse in the middle of a generation,
#: what this one may send. 2: PRECISE, and several dispatches outstanding at a time. 3: ADOPT.
VERSION = 3
HEADER_SIZE = 32
#: The part of it that its crc32 covers.
SUMMED_SIZE = 28
#: Where the epoch stands.
EPOCH = slice(12, 16)
#: Bit 0 of the flags of a PING: this one is the answer.
PONG_FLAG = 1
#: Bit 0 of the flags of a DISPATCH: compute with float32 activations, whatever the kernels can.
PRECISE_FLAG = 1
#: Bit 1 of the flags of a DISPATCH: take the blocks that are not held here, from wherever they are.
ADOPT_FLAG = 2

#: DISPATCH and REPLY. 4096 rows of 8192 bf16 values; a longer prefill goes in several dispatches.
MAX_PAYLOAD = 64 << 20
#: WELCOME, which carries a roster: 4096 names of 64 characters and their weights fit three times.
MAX_CONTROL = 1 << 20
#: HELLO: a few hundred bytes today; it is the first thing a stranger can send.
MAX_HELLO = 64 << 10
#: ERROR: a code and one sentence.
MAX_ERROR = 4 << 10
#: GOODBYE: one sentence.
MAX_GOODBYE = 1 << 10
#: Rows in a dispatch: eight prefill chunks of 512.
MAX_ROWS = 4096
#: Values in a row, as manifests allow. The widest published models have 16,384.
MAX_HIDDEN = 1 << 17
#: (row, expert) pairs in a dispatch: 64 for each of 4096 rows. Bounds the work that one asks for.
MAX_PAIRS = 1 << 18
#: Dispatches of one link that are not answered yet: a driver that computes the attention of some
#: chunks of a prompt while nodes have others needs two or three.
MAX_OUTSTANDING = 8
MAX_U32 = 0xFFFFFFFF


class Kind(IntEnum):
    """What a frame is. Numbers are on the wire."""

    HELLO = 1
    WELCOME = 2
    DISPATCH = 3
    REPLY = 4
    ERROR = 5
    PING = 6
    WORKING = 7
    GOODBYE = 8


class ReplyMode(IntEnum):
    """SUM: one weighted sum per row. EXACT: each pair's own output, unweighted."""

    SUM = 0
    EXACT = 1


class ErrorCode(IntEnum):
    """Why an ERROR frame was sent. Numbers are on the wire, and stable over versions."""

    PROTOCOL = 1
    VERSION = 2
    MODEL = 3
    KEY = 4
    ROSTER = 5
    NOT_OWNED = 6
    BAD_VALUES = 7
    TOO_LARGE = 8
    NUMERICS = 9
    BUSY = 10
    INTERNAL = 11
    DRAINING = 12
    NO_BLOCK = 13


#: The most payload bytes a frame of each kind may have.
LIMITS = {
    Kind.HELLO: MAX_HELLO,
    Kind.WELCOME: MAX_CONTROL,
    Kind.DISPATCH: MAX_PAYLOAD,
    Kind.REPLY: MAX_PAYLOAD,
    Kind.ERROR: MAX_ERROR,
    Kind.PING: 0,
    Kind.WORKING: 0,
    Kind.GOODBYE: MAX_GOODBYE,
}

#: What encoders return, for sendmsg: the header first.
Buffer = bytes | memoryview
#: crc32 of a buffer, going on from that of what stands before it: zlib's, or one that is faster.
Checksum = Callable[[Buffer, int], int]

_ALL = struct.Struct("<4sBBHIIHBBHHII")
_SUMMED = struct.Struct("<4sBBHIIHBBHHI")
_CRC = struct.Struct("<I")
_FLAGS = {Kind.PING: PONG_FLAG, Kind.DISPATCH: PRECISE_FLAG | ADOPT_FLAG}
_KINDS = {int(kind): kind for kind in Kind}
_DTYPES = {int(dtype): dtype for dtype in WireDType}
_MODES = {int(mode): mode for mode in ReplyMode}


class Header(NamedTuple):
    """A header as it came, each field checked by itself. `crc` is not yet compared."""

    version: int
    kind: Kind
    flags: int
    sequence: int
    epoch: int
    layer: int
    dtype: WireDType
    mode: ReplyMode
    rows: int
    length: int
    crc: int


def encode_frame(
    kind: Kind,
    payload: Sequence[Buffer] = (),
    *,
    flags: int = 0,
    sequence: int = 0,
    epoch: int = 0,
    layer: int = 0,
    dtype: int = 0,
    mode: int = 0,
    rows: int = 0,
) -> list[Buffer]:
    """The buffers of one frame: its header, then `payload` as it is, uncopied.

    Raises LocalProtocolError for a field or a payload that the header cannot carry.
    """
    length = 0
    for part in payload:
        length += part.nbytes if isinstance(part, memoryview) else len(part)
    head = encode_head(kind, flags, sequence, epoch, layer, dtype, mode, rows, length)
    return summed(head, payload)


def summed(head: bytes, payload: Sequence[Buffer], crc32: Checksum = crc32) -> list[Buffer]:
    """The buffers of a frame: `head` with the crc32 of all, then `payload` as it is."""
    crc = crc32(head, 0)
    for part in payload:
        crc = crc32(part, crc)
    return [head + _CRC.pack(crc), *payload]


def encode_head(
    kind: Kind,
    flags: int,
    sequence: int,
    epoch: int,
    layer: int,
    dtype: int,
    mode: int,
    rows: int,
    length: int,
) -> bytes:
    """A header but for its crc32. Raises LocalProtocolError for a field that it cannot carry."""
    if length > LIMITS[kind]:
        raise LocalProtocolError(f"a {kind.name} of {length} bytes; at most {LIMITS[kind]} travel")
    try:
        return _SUMMED.pack(
            MAGIC, VERSION, kind, flags, sequence, epoch, layer, dtype, mode, rows, 0, length
        )
    except struct.error as error:
        fields = (flags, sequence, epoch, layer, dtype, mode, rows, 0, length)
        raise LocalProtocolError(f"a {kind.name} header cannot carry {fields}") from error


def decode_header(data: memoryview | bytes) -> Header:
    """Read 32 bytes. Raises RemoteProtocolError for what no frame here can start with."""
    (
        magic, version, kind_number, flags, sequence, epoch, layer, dtype_number, mode_number,
        rows, reserved, length, crc,
    ) = _ALL.unpack(data)  # fmt: skip
    if magic != MAGIC:
        raise RemoteProtocolError(f"a frame starts with {magic.hex(' ')}, not with {MAGIC!r}")
    kind = _KINDS.get(kind_number)
    if version != VERSION and kind is not Kind.ERROR:
        problem = f"the peer speaks protocol version {version} and this side version {VERSION}"
        raise RemoteProtocolError(problem, ErrorCode.VERSION)
    if kind is None:
        raise RemoteProtocolError(f"there is no frame of kind {kind_number}")
    if reserved or (flags and flags & ~_FLAGS.get(kind, 0)):
        raise RemoteProtocolError(f"a {kind.name} has unknown flags or a reserved field set")
    if length > LIMITS[kind]:
        problem = f"a {kind.name} announces {length} bytes; the limit is {LIMITS[kind]}"
        raise RemoteProtocolError(problem, ErrorCode.TOO_LARGE)
    dtype, mode = _DTYPES.get(dtype_number), _MODES.get(mode_number)
    if dtype is None or mode is None:
        raise RemoteProtocolError(f"unknown dtype {dtype_number} or reply mode {mode_number}")
    if kind is Kind.DISPATCH or kind is Kind.REPLY:
        _check_rows(kind, rows)
        if mode and dtype is WireDType.INT8:
            raise RemoteProtocolError(f"a {kind.name} in EXACT mode of int8 rows, which round")
    elif layer or dtype or mode or rows or (epoch and not (kind is Kind.PING and flags)):
        raise RemoteProtocolError(f"a {kind.name} sets fields that belong to a dispatch")
    return Header(
        version, kind, flags, sequence, epoch, layer, dtype, mode, rows, length, crc
    )  # fmt: skip


def crc_of(header: Buffer) -> int:
    """The crc32 that a header states."""
    crc: int = _CRC.unpack_from(header, SUMMED_SIZE)[0]
    return crc


def _check_rows(kind: Kind, rows: int) -> None:
    if rows == 0:
        raise RemoteProtocolError(f"a {kind.name} without rows")
    if rows > MAX_ROWS:
        problem = f"a {kind.name} of {rows} rows; the limit is {MAX_ROWS}"
        raise RemoteProtocolError(problem, ErrorCode.TOO_LARGE)

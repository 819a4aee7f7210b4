"""What travels on a link: every kind by name, and the codecs of DISPATCH and REPLY.

Encoders return a list of buffers, the header first, for sendmsg; the arrays in it are not copied.
Decoders return arrays that are views of the payload they were given: they hold until the caller
uses that memory again. DISPATCH and REPLY are written for the token loop: nothing is done twice.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from expert_network.errors import LocalProtocolError, RemoteProtocolError
from expert_protocol.dtypes import RawArray, WireDType, finite
from expert_protocol.greetings import (
    Hello,
    Welcome,
    decode_hello,
    decode_welcome,
    encode_hello,
    encode_welcome,
)
from expert_protocol.header import (
    ADOPT_FLAG,
    MAX_HIDDEN,
    MAX_PAIRS,
    MAX_PAYLOAD,
    MAX_ROWS,
    MAX_U32,
    PRECISE_FLAG,
    Buffer,
    Checksum,
    ErrorCode,
    Header,
    Kind,
    ReplyMode,
    encode_head,
    summed,
)
from expert_protocol.notices import (
    ErrorReply,
    Goodbye,
    Ping,
    Pong,
    Working,
    decode_error,
    decode_goodbye,
    encode_error,
    encode_goodbye,
    encode_ping,
    encode_pong,
    encode_working,
)

__all__ = [
    "Dispatch",
    "ErrorCode",
    "ErrorReply",
    "Goodbye",
    "Hello",
    "Ping",
    "Pong",
    "Reply",
    "ReplyMode",
    "Welcome",
    "WireDType",
    "Working",
    "decode_dispatch",
    "decode_error",
    "decode_goodbye",
    "decode_hello",
    "decode_reply",
    "decode_welcome",
    "dispatch_pairs",
    "dispatch_size",
    "encode_dispatch",
    "encode_error",
    "encode_goodbye",
    "encode_hello",
    "encode_ping",
    "encode_pong",
    "encode_reply",
    "encode_welcome",
    "encode_working",
    "finite",
    "reply_size",
    "rows_that_fit",
]

_TIMES = struct.Struct("<II")
#: Bytes of a REPLY before its values.
TIMES_SIZE = _TIMES.size
_U32 = np.dtype("<u4")
_U16 = np.dtype("<u2")
_F32 = np.dtype("<f4")
#: Bytes of one pair in a dispatch: an expert id (u16) and a routing weight (f32).
_PAIR = 6
# An attribute of an enum takes Python 3.11 as long as a call.
_DISPATCH, _REPLY = Kind.DISPATCH, Kind.REPLY
_MOST_COLUMNS = {dtype: dtype.columns(MAX_HIDDEN) for dtype in WireDType}


# Not frozen, since that makes an object three times as slow to make, and each token makes many.
@dataclass(slots=True, eq=False)
class Dispatch:
    """One node's part of one MoE layer.

    rows: raw (R, columns(D)), offsets: u32 (R + 1), ids: u16 (P), weights: f32 (P). Row r goes to
    the experts ids[offsets[r]:offsets[r + 1]], at least one. precise: with float32 activations;
    EXACT always is. adopt: a node that does not hold a block is to get it first.
    """

    layer: int
    epoch: int
    mode: ReplyMode
    dtype: WireDType
    rows: RawArray
    offsets: NDArray[np.uint32]
    ids: NDArray[np.uint16]
    weights: NDArray[np.float32]
    precise: bool = False
    adopt: bool = False


@dataclass(slots=True, eq=False)
class Reply:
    """data: raw (R, columns(D)) for SUM, (P, columns(D)) in the dispatch's pair order for EXACT.

    Times in microseconds.
    """

    mode: ReplyMode
    dtype: WireDType
    queue_us: int
    compute_us: int
    data: RawArray


def rows_that_fit(
    hidden: int,
    pairs_per_row: int,
    mode: ReplyMode,
    dtype: WireDType,
    max_rows: int = MAX_ROWS,
    max_payload: int = MAX_PAYLOAD,
) -> int:
    """How many rows one dispatch may carry so that neither it nor its reply is too large."""
    row = dtype.row_bytes(hidden)
    asked = (max_payload - 4) // (row + 4 + _PAIR * pairs_per_row)
    answered = (max_payload - TIMES_SIZE) // (row * (pairs_per_row if mode else 1))
    return max(1, min(max_rows, asked, answered, MAX_PAIRS // pairs_per_row))


def dispatch_size(rows: int, pairs: int, hidden: int, dtype: WireDType) -> int:
    """Payload bytes of a dispatch of `rows` rows and `pairs` pairs."""
    return asked_bytes(rows, pairs, dtype.row_bytes(hidden))


def asked_bytes(rows: int, pairs: int, row_bytes: int) -> int:
    """`dispatch_size` where a row's bytes are known."""
    return rows * (row_bytes + 4) + 4 + _PAIR * pairs


def reply_size(rows: int, pairs: int, hidden: int, mode: ReplyMode, dtype: WireDType) -> int:
    """Payload bytes of the reply to a dispatch of `rows` rows and `pairs` pairs."""
    return TIMES_SIZE + (pairs if mode else rows) * dtype.row_bytes(hidden)


def heads_of_one_row(
    layer: int, epoch: int, dtype: WireDType, precise: bool, hidden: int, adopt: bool = False
) -> tuple[bytes, bytes]:
    """The headers, but for their crc32, of a DISPATCH of one row in SUM mode and of its REPLY.

    Sequence numbers are 0 in them, and so is the length of the DISPATCH, which depends on its
    pairs.
    """
    answered = reply_size(1, 0, hidden, ReplyMode.SUM, dtype)
    flags = _flags(precise, adopt)
    return (
        encode_head(_DISPATCH, flags, 0, epoch, layer, dtype, ReplyMode.SUM, 1, 0),
        encode_head(_REPLY, 0, 0, epoch, layer, dtype, ReplyMode.SUM, 1, answered),
    )


# DISPATCH: rows, offsets, ids, weights


def encode_dispatch(dispatch: Dispatch, sequence: int, crc32: Checksum = crc32) -> list[Buffer]:
    """The frame's buffers. Raises LocalProtocolError for arrays of another form."""
    problem = _dispatch_problem(dispatch)
    if problem is not None:
        raise LocalProtocolError(f"this dispatch cannot be sent: {problem}")
    rows, offsets, ids, weights = dispatch.rows, dispatch.offsets, dispatch.ids, dispatch.weights
    head = encode_head(
        _DISPATCH,
        _flags(dispatch.precise, dispatch.adopt),
        sequence,
        dispatch.epoch,
        dispatch.layer,
        dispatch.dtype,
        dispatch.mode,
        len(rows),
        rows.nbytes + offsets.nbytes + ids.nbytes + weights.nbytes,
    )
    return summed(head, (rows.data, offsets.data, ids.data, weights.data), crc32)


def _flags(precise: bool, adopt: bool) -> int:
    return (PRECISE_FLAG if precise else 0) | (ADOPT_FLAG if adopt else 0)


def _dispatch_problem(dispatch: Dispatch) -> str | None:
    rows, offsets, ids, weights = dispatch.rows, dispatch.offsets, dispatch.ids, dispatch.weights
    dtype, shape, pairs = dispatch.dtype, rows.shape, len(ids)
    if len(shape) != 2 or not 0 < shape[0] <= MAX_ROWS or not 0 < shape[1] <= _MOST_COLUMNS[dtype]:
        return f"rows of shape {shape}"
    if dispatch.mode and dtype is WireDType.INT8:
        return "int8 rows round, and EXACT may not"
    if rows.dtype != dtype.raw or offsets.dtype != _U32:
        return f"rows are {rows.dtype} for {dtype.label}, offsets {offsets.dtype}"
    if ids.dtype != _U16 or weights.dtype != _F32:
        return f"ids are {ids.dtype}, weights {weights.dtype}"
    if offsets.shape != (shape[0] + 1,) or ids.shape != (pairs,) or weights.shape != (pairs,):
        return f"offsets {offsets.shape}, ids {ids.shape}, weights {weights.shape}"
    if not (
        rows.flags.c_contiguous
        and offsets.flags.c_contiguous
        and ids.flags.c_contiguous
        and weights.flags.c_contiguous
    ):
        return "an array that is not contiguous"
    if pairs > MAX_PAIRS:
        return f"{pairs} pairs; the limit is {MAX_PAIRS}"
    return _offsets_problem(offsets, pairs)


def _offsets_problem(offsets: NDArray[np.uint32], pairs: int) -> str | None:
    first, last, rows = offsets.item(0), offsets.item(-1), len(offsets) - 1
    if first or last != pairs or pairs < rows:
        return f"offsets run from {first} to {last} over {pairs} pairs"
    if rows > 1 and not (offsets[1:] > offsets[:-1]).all():
        return "offsets that do not increase: a row without an expert"
    return None


def dispatch_pairs(header: Header, hidden: int) -> int:
    """How many pairs a DISPATCH of this length has. Raises RemoteProtocolError if it cannot be."""
    return pairs_in(header, header.dtype.row_bytes(hidden), hidden)


def pairs_in(header: Header, row_bytes: int, hidden: int) -> int:
    """`dispatch_pairs` where a row's bytes are known."""
    rows = header.rows
    pairs, odd = divmod(header.length - asked_bytes(rows, 0, row_bytes), _PAIR)
    if odd or pairs < rows:
        problem = f"a DISPATCH of {header.length} bytes cannot hold {rows} rows of {hidden}"
        raise RemoteProtocolError(problem)
    if pairs > MAX_PAIRS:
        problem = f"a DISPATCH of {pairs} pairs; the limit is {MAX_PAIRS}"
        raise RemoteProtocolError(problem, ErrorCode.TOO_LARGE)
    return pairs


def decode_dispatch(header: Header, payload: memoryview | bytes, hidden: int) -> Dispatch:
    """Views of `payload`. Raises RemoteProtocolError for a wrong length or offsets."""
    pairs = dispatch_pairs(header, hidden)
    return dispatch_in(header, payload, header.dtype.columns(hidden), pairs)


def dispatch_in(header: Header, payload: memoryview | bytes, columns: int, pairs: int) -> Dispatch:
    """`decode_dispatch` where a row's columns and the number of pairs are known."""
    _, _, flags, _, epoch, layer, dtype, mode, rows, _, _ = header
    array = np.ndarray  # half the time of frombuffer and reshape
    at_offsets = rows * columns * dtype.raw.itemsize
    at_ids = at_offsets + 4 * (rows + 1)
    offsets = array((rows + 1,), _U32, payload, at_offsets)
    problem = _offsets_problem(offsets, pairs)
    if problem is not None:
        raise RemoteProtocolError(f"a DISPATCH has {problem}")
    return Dispatch(
        layer,
        epoch,
        mode,
        dtype,
        array((rows, columns), dtype.raw, payload),
        offsets,
        array((pairs,), _U16, payload, at_ids),
        array((pairs,), _F32, payload, at_ids + 2 * pairs),
        bool(flags & PRECISE_FLAG),
        bool(flags & ADOPT_FLAG),
    )


# REPLY: queue and compute microseconds, then the values


def encode_reply(
    reply: Reply, request: Header, crc32: Checksum = crc32, epoch: int = 0
) -> list[Buffer]:
    """The frame's buffers; sequence, layer and rows are the request's, and so is its epoch unless
    the node's own `epoch` is later.

    Raises LocalProtocolError for data of another form. Times beyond 71 minutes are cut.
    """
    data = reply.data
    if data.ndim != 2 or data.dtype != reply.dtype.raw or not data.flags.c_contiguous:
        raise LocalProtocolError(f"this reply cannot be sent: {data.dtype} of shape {data.shape}")
    times = _TIMES.pack(min(reply.queue_us, MAX_U32), min(reply.compute_us, MAX_U32))
    _, _, _, sequence, asked, layer, _, _, rows, _, _ = request
    length, epoch = TIMES_SIZE + data.nbytes, max(asked, epoch)
    head = encode_head(_REPLY, 0, sequence, epoch, layer, reply.dtype, reply.mode, rows, length)
    return summed(head, (times, data.data), crc32)


def decode_reply(header: Header, payload: memoryview | bytes, hidden: int) -> Reply:
    """A view of `payload`. Raises RemoteProtocolError unless rows of `hidden` values fill it."""
    dtype, columns = header.dtype, header.dtype.columns(hidden)
    count, odd = divmod(header.length - TIMES_SIZE, columns * dtype.raw.itemsize)
    if odd or count < header.rows or (header.mode is ReplyMode.SUM and count != header.rows):
        problem = f"a REPLY of {header.length} bytes cannot hold {header.rows} rows of {hidden}"
        raise RemoteProtocolError(problem)
    return reply_in(payload, header.mode, dtype, (count, columns))


def reply_in(
    payload: memoryview | bytes, mode: ReplyMode, dtype: WireDType, shape: tuple[int, int]
) -> Reply:
    """A view of `payload`, which has the size of a REPLY of `shape`."""
    queue_us, compute_us = _TIMES.unpack_from(payload)
    data = np.ndarray(shape, dtype.raw, payload, TIMES_SIZE)
    return Reply(mode, dtype, queue_us, compute_us, data)

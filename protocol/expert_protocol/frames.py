"""What travels on a link: every kind by name, and the codecs of DISPATCH and REPLY.

Encoders return a list of buffers, the header first, for sendmsg; the arrays in it are not copied.
Decoders return arrays that are views of the payload they were given: they hold until the caller
uses that memory again. DISPATCH and REPLY are written for the token loop: nothing is done twice.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

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
    MAX_HIDDEN,
    MAX_PAIRS,
    MAX_PAYLOAD,
    MAX_ROWS,
    MAX_U32,
    PRECISE_FLAG,
    Buffer,
    ErrorCode,
    Header,
    Kind,
    ReplyMode,
    encode_frame,
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
_U32 = np.dtype("<u4")
_U16 = np.dtype("<u2")
_F32 = np.dtype("<f4")
#: Bytes of one pair in a dispatch: an expert id (u16) and a routing weight (f32).
_PAIR = 6


@dataclass(frozen=True, slots=True, eq=False)
class Dispatch:
    """One node's part of one MoE layer.

    rows: raw (R, columns(D)), offsets: u32 (R + 1), ids: u16 (P), weights: f32 (P). Row r goes to
    the experts ids[offsets[r]:offsets[r + 1]], at least one. precise: with float32 activations;
    EXACT always is.
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


@dataclass(frozen=True, slots=True, eq=False)
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
    answered = (max_payload - _TIMES.size) // (row * (pairs_per_row if mode else 1))
    return max(1, min(max_rows, asked, answered, MAX_PAIRS // pairs_per_row))


def dispatch_size(rows: int, pairs: int, hidden: int, dtype: WireDType) -> int:
    """Payload bytes of a dispatch of `rows` rows and `pairs` pairs."""
    return rows * (dtype.row_bytes(hidden) + 4) + 4 + _PAIR * pairs


def reply_size(rows: int, pairs: int, hidden: int, mode: ReplyMode, dtype: WireDType) -> int:
    """Payload bytes of the reply to a dispatch of `rows` rows and `pairs` pairs."""
    return _TIMES.size + (pairs if mode else rows) * dtype.row_bytes(hidden)


# DISPATCH: rows, offsets, ids, weights


def encode_dispatch(dispatch: Dispatch, sequence: int) -> list[Buffer]:
    """The frame's buffers. Raises LocalProtocolError for arrays of another form."""
    rows, offsets, ids, weights = dispatch.rows, dispatch.offsets, dispatch.ids, dispatch.weights
    problem = _dispatch_problem(dispatch)
    if problem is not None:
        raise LocalProtocolError(f"this dispatch cannot be sent: {problem}")
    return encode_frame(
        Kind.DISPATCH,
        (rows.data, offsets.data, ids.data, weights.data),
        flags=PRECISE_FLAG if dispatch.precise else 0,
        sequence=sequence,
        epoch=dispatch.epoch,
        layer=dispatch.layer,
        dtype=dispatch.dtype,
        mode=dispatch.mode,
        rows=len(rows),
    )


def _dispatch_problem(dispatch: Dispatch) -> str | None:
    rows, offsets, ids, weights = dispatch.rows, dispatch.offsets, dispatch.ids, dispatch.weights
    most = dispatch.dtype.columns(MAX_HIDDEN)
    if rows.ndim != 2 or not 0 < rows.shape[0] <= MAX_ROWS or not 0 < rows.shape[1] <= most:
        return f"rows of shape {rows.shape}"
    if dispatch.mode and dispatch.dtype is WireDType.INT8:
        return "int8 rows round, and EXACT may not"
    if rows.dtype != dispatch.dtype.raw or offsets.dtype != _U32:
        return f"rows are {rows.dtype} for {dispatch.dtype.label}, offsets {offsets.dtype}"
    if ids.dtype != _U16 or weights.dtype != _F32:
        return f"ids are {ids.dtype}, weights {weights.dtype}"
    pairs = ids.size
    if offsets.shape != (len(rows) + 1,) or ids.shape != (pairs,) or weights.shape != (pairs,):
        return f"offsets {offsets.shape}, ids {ids.shape}, weights {weights.shape}"
    for array in (rows, offsets, ids, weights):
        if not array.flags.c_contiguous:
            return "an array that is not contiguous"
    if pairs > MAX_PAIRS:
        return f"{pairs} pairs; the limit is {MAX_PAIRS}"
    return _offsets_problem(offsets, pairs)


def _offsets_problem(offsets: NDArray[np.uint32], pairs: int) -> str | None:
    if offsets[0] != 0 or offsets[-1] != pairs or pairs < len(offsets) - 1:
        return f"offsets run from {offsets[0]} to {offsets[-1]} over {pairs} pairs"
    if len(offsets) > 2 and not (offsets[1:] > offsets[:-1]).all():
        return "offsets that do not increase: a row without an expert"
    return None


def dispatch_pairs(header: Header, hidden: int) -> int:
    """How many pairs a DISPATCH of this length has. Raises RemoteProtocolError if it cannot be."""
    rest = header.length - dispatch_size(header.rows, 0, hidden, header.dtype)
    pairs, odd = divmod(rest, _PAIR)
    if odd or pairs < header.rows:
        problem = f"a DISPATCH of {header.length} bytes cannot hold {header.rows} rows of {hidden}"
        raise RemoteProtocolError(problem)
    if pairs > MAX_PAIRS:
        problem = f"a DISPATCH of {pairs} pairs; the limit is {MAX_PAIRS}"
        raise RemoteProtocolError(problem, ErrorCode.TOO_LARGE)
    return pairs


def decode_dispatch(header: Header, payload: memoryview | bytes, hidden: int) -> Dispatch:
    """Views of `payload`. Raises RemoteProtocolError for a wrong length or offsets."""
    rows, dtype = header.rows, header.dtype
    pairs = dispatch_pairs(header, hidden)
    columns = dtype.columns(hidden)
    at_offsets = rows * columns * dtype.raw.itemsize
    at_ids = at_offsets + 4 * (rows + 1)
    offsets = np.frombuffer(payload, _U32, rows + 1, at_offsets)
    problem = _offsets_problem(offsets, pairs)
    if problem is not None:
        raise RemoteProtocolError(f"a DISPATCH has {problem}")
    return Dispatch(
        header.layer,
        header.epoch,
        header.mode,
        dtype,
        np.frombuffer(payload, dtype.raw, rows * columns).reshape(rows, columns),
        offsets,
        np.frombuffer(payload, _U16, pairs, at_ids),
        np.frombuffer(payload, _F32, pairs, at_ids + 2 * pairs),
        bool(header.flags),
    )


# REPLY: queue and compute microseconds, then the values


def encode_reply(reply: Reply, request: Header) -> list[Buffer]:
    """The frame's buffers; sequence, epoch, layer and rows are the request's.

    Raises LocalProtocolError for data of another form. Times beyond 71 minutes are cut.
    """
    data = reply.data
    if data.ndim != 2 or data.dtype != reply.dtype.raw or not data.flags.c_contiguous:
        raise LocalProtocolError(f"this reply cannot be sent: {data.dtype} of shape {data.shape}")
    times = _TIMES.pack(min(reply.queue_us, MAX_U32), min(reply.compute_us, MAX_U32))
    return encode_frame(
        Kind.REPLY,
        (times, data.data),
        sequence=request.sequence,
        epoch=request.epoch,
        layer=request.layer,
        dtype=reply.dtype,
        mode=reply.mode,
        rows=request.rows,
    )


def decode_reply(header: Header, payload: memoryview | bytes, hidden: int) -> Reply:
    """A view of `payload`. Raises RemoteProtocolError unless rows of `hidden` values fill it."""
    count, odd = divmod(header.length - _TIMES.size, header.dtype.row_bytes(hidden))
    if odd or count < header.rows or (header.mode is ReplyMode.SUM and count != header.rows):
        problem = f"a REPLY of {header.length} bytes cannot hold {header.rows} rows of {hidden}"
        raise RemoteProtocolError(problem)
    queue_us, compute_us = _TIMES.unpack_from(payload)
    columns = header.dtype.columns(hidden)
    data = np.frombuffer(payload, header.dtype.raw, count * columns, _TIMES.size)
    return Reply(header.mode, header.dtype, queue_us, compute_us, data.reshape(count, columns))

"""expert_protocol.frames"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert_network.errors import LocalProtocolError, RemoteProtocolError
from expert_protocol.frames import (
    Reply,
    ReplyMode,
    WireDType,
    decode_dispatch,
    decode_reply,
    dispatch_pairs,
    dispatch_size,
    encode_dispatch,
    encode_reply,
    reply_size,
    rows_that_fit,
)
from expert_protocol.header import (
    MAX_PAIRS,
    MAX_PAYLOAD,
    Buffer,
    ErrorCode,
    Header,
    Kind,
    decode_header,
    encode_frame,
)
from tests.support.wire import HIDDEN, KINDS_OF_ROWS, dispatch, facts, reply_to

counts_of_rows = st.lists(st.integers(1, 5), min_size=1, max_size=6)


def parts(frame: list[Buffer]) -> tuple[Header, memoryview]:
    return decode_header(frame[0]), memoryview(bytearray(b"".join(frame[1:])))


@given(
    counts=counts_of_rows,
    width=st.integers(1, 9),
    layer=st.integers(0, 65535),
    epoch=st.integers(0, 2**32 - 1),
    sequence=st.integers(1, 2**32 - 1),
    form=st.sampled_from(KINDS_OF_ROWS),
    precise=st.booleans(),
    adopt=st.booleans(),
)
def test_dispatch_round_trip(
    sequence: int, width: int, form: tuple[ReplyMode, WireDType], **fields: Any
) -> None:
    """A dispatch is read back with the same bits, odd widths included."""
    sent = dispatch(width=width, mode=form[0], dtype=form[1], **fields)
    header, payload = parts(encode_dispatch(sent, sequence))
    assert header.sequence == sequence
    assert header.length == len(payload)
    assert header.length == dispatch_size(len(sent.rows), len(sent.ids), width, sent.dtype)
    assert dispatch_pairs(header, width) == len(sent.ids)
    assert facts(decode_dispatch(header, payload, width)) == facts(sent)


@given(
    counts=counts_of_rows,
    width=st.integers(1, 9),
    form=st.sampled_from(KINDS_OF_ROWS),
    times=st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)),
)
def test_reply_round_trip(
    times: tuple[int, int], width: int, form: tuple[ReplyMode, WireDType], **fields: Any
) -> None:
    """A reply is read back with the same bits, and repeats the request's fields."""
    asked = dispatch(width=width, mode=form[0], dtype=form[1], **fields)
    request = parts(encode_dispatch(asked, 9))[0]
    sent = reply_to(asked, *times)
    header, payload = parts(encode_reply(sent, request))
    assert header[3:9] == request[3:9]
    size = reply_size(len(asked.rows), len(asked.ids), width, asked.mode, asked.dtype)
    assert header.length == len(payload) == size
    assert facts(decode_reply(header, payload, width)) == facts(sent)


def test_payload_order() -> None:
    """rows, offsets, ids, weights: each from its documented offset."""
    sent = dispatch((1, 2), dtype=WireDType.F32)
    _, payload = parts(encode_dispatch(sent, 1))
    order = [sent.rows, sent.offsets, sent.ids, sent.weights]
    assert payload == b"".join(array.tobytes() for array in order)


def test_nothing_is_copied() -> None:
    """Encoders hand out the arrays themselves; decoders hand out views of the payload."""
    sent = dispatch((2, 1))
    frame = encode_dispatch(sent, 1)
    assert np.shares_memory(np.frombuffer(frame[1], np.uint16), sent.rows)
    header, payload = parts(frame)
    whole = np.frombuffer(payload, np.uint8)
    got = decode_dispatch(header, payload, HIDDEN)
    for array in (got.rows, got.offsets, got.ids, got.weights):
        assert np.shares_memory(array, whole)
    answer = encode_reply(reply_to(sent), header)
    reply_header, reply_payload = parts(answer)
    data = decode_reply(reply_header, reply_payload, HIDDEN).data
    assert np.shares_memory(data, np.frombuffer(reply_payload, np.uint8))


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": np.zeros((2, HIDDEN), np.float32)},
        {"rows": np.zeros(HIDDEN, np.uint16)},
        {"rows": np.zeros((0, HIDDEN), np.uint16)},
        {"rows": np.zeros((2, 0), np.uint16)},
        {"rows": np.zeros((1, HIDDEN), np.uint16)},
        {"rows": np.zeros((HIDDEN, 2), np.uint16).T},
        {"rows": np.zeros((4097, 1), np.uint16)},
        {"offsets": np.array([0, 1, 3], np.int64)},
        {"offsets": np.array([0, 1, 2], np.uint32)},
        {"offsets": np.array([1, 2, 3], np.uint32)},
        {"offsets": np.array([0, 3, 3], np.uint32)},
        {"offsets": np.array([0, 0, 3], np.uint32)},
        {"offsets": np.array([[0, 1, 3]], np.uint32)},
        {"ids": np.arange(3, dtype=np.int32)},
        {"ids": np.arange(6, dtype=np.uint16)[::2]},
        {"weights": np.ones(3, np.float64)},
        {"weights": np.ones(2, np.float32)},
        {"dtype": WireDType.INT8},
        {"layer": 70000},
        {"epoch": -1},
    ],
)
def test_a_dispatch_of_another_form_is_our_fault(changes: dict[str, Any]) -> None:
    """What the peer would refuse is never sent: LocalProtocolError."""
    sent = dispatch((1, 2))
    encode_dispatch(sent, 1)
    with pytest.raises(LocalProtocolError):
        encode_dispatch(replace(sent, **changes), 1)


def test_int8_rows_are_never_exact() -> None:
    """int8 rows round: they are not sent in EXACT mode."""
    sent = dispatch((1, 2), dtype=WireDType.INT8)
    encode_dispatch(sent, 1)
    with pytest.raises(LocalProtocolError, match="int8"):
        encode_dispatch(replace(sent, mode=ReplyMode.EXACT), 1)


def test_too_many_pairs_is_our_fault() -> None:
    """One pair over the limit is not sent."""
    pairs = MAX_PAIRS + 1
    with pytest.raises(LocalProtocolError, match=str(MAX_PAIRS)):
        encode_dispatch(dispatch((pairs,)), 1)


def test_too_many_bytes_is_our_fault() -> None:
    """A dispatch over MAX_PAYLOAD is not sent."""
    with pytest.raises(LocalProtocolError, match=str(MAX_PAYLOAD)):
        rows = np.zeros((2049, 16384), np.uint16)
        encode_dispatch(replace(dispatch((1,) * 2049), rows=rows), 1)


@pytest.mark.parametrize(
    "data",
    [
        np.zeros((1, HIDDEN), np.float32),
        np.zeros(HIDDEN, np.uint16),
        np.zeros((HIDDEN, 2), np.uint16).T,
    ],
)
def test_a_reply_of_another_form_is_our_fault(data: np.ndarray[Any, Any]) -> None:
    """A reply that does not hold raw contiguous rows is not sent."""
    request = parts(encode_dispatch(dispatch(), 1))[0]
    with pytest.raises(LocalProtocolError):
        encode_reply(Reply(ReplyMode.SUM, WireDType.BF16, 0, 0, data), request)


def test_times_are_cut() -> None:
    """A computation of more than 71 minutes is reported as 2**32 - 1 microseconds."""
    asked = dispatch()
    request = parts(encode_dispatch(asked, 1))[0]
    header, payload = parts(encode_reply(reply_to(asked, 2**40, 2**32), request))
    got = decode_reply(header, payload, HIDDEN)
    assert (got.queue_us, got.compute_us) == (2**32 - 1, 2**32 - 1)


@pytest.mark.parametrize("offsets", [[0, 3, 3], [0, 0, 3], [0, 1, 2], [1, 2, 3], [0, 2**32 - 1, 3]])
def test_bad_offsets_are_refused(offsets: list[int]) -> None:
    """Offsets that do not rise from 0 to the number of pairs are the peer's fault."""
    header, payload = parts(encode_dispatch(dispatch((1, 2)), 1))
    at = 2 * HIDDEN * 2
    payload[at : at + 12] = np.array(offsets, np.uint32).tobytes()
    with pytest.raises(RemoteProtocolError, match="offsets"):
        decode_dispatch(header, payload, HIDDEN)


@given(st.integers(0, 400), st.integers(1, 8), st.sampled_from(WireDType))
def test_lengths_that_do_not_fit_are_refused(length: int, rows: int, dtype: WireDType) -> None:
    """A DISPATCH has as many bytes as some number of pairs needs, or it is refused."""
    head = encode_frame(Kind.DISPATCH, (bytes(length),), sequence=1, dtype=dtype, rows=rows)[0]
    possible = {dispatch_size(rows, pairs, HIDDEN, dtype): pairs for pairs in range(rows, 100)}
    if length in possible:
        assert dispatch_pairs(decode_header(head), HIDDEN) == possible[length]
    else:
        with pytest.raises(RemoteProtocolError):
            dispatch_pairs(decode_header(head), HIDDEN)


def test_too_many_pairs_are_refused() -> None:
    """A DISPATCH whose length means more pairs than the limit is TOO_LARGE, before it is read."""
    header = parts(encode_dispatch(dispatch(), 1))[0]
    largest = header._replace(length=dispatch_size(1, MAX_PAIRS, HIDDEN, header.dtype))
    assert dispatch_pairs(largest, HIDDEN) == MAX_PAIRS
    with pytest.raises(RemoteProtocolError) as caught:
        dispatch_pairs(largest._replace(length=largest.length + 6), HIDDEN)
    assert caught.value.code == ErrorCode.TOO_LARGE


@given(st.integers(0, 200), st.sampled_from(KINDS_OF_ROWS))
def test_reply_lengths_that_do_not_fit_are_refused(
    length: int, form: tuple[ReplyMode, WireDType]
) -> None:
    """A REPLY has whole rows, exactly one per row in sum mode, or it is refused."""
    mode, dtype = form
    asked = dispatch((1, 1), mode=mode, dtype=dtype)
    header, _ = parts(encode_reply(reply_to(asked), parts(encode_dispatch(asked, 1))[0]))
    row = dtype.row_bytes(HIDDEN)
    rows, odd = divmod(length - 8, row)
    header = header._replace(length=length)
    if odd or rows < 2 or (mode is ReplyMode.SUM and rows != 2):
        with pytest.raises(RemoteProtocolError):
            decode_reply(header, bytes(length), HIDDEN)
    else:
        assert decode_reply(header, bytes(length), HIDDEN).data.shape == (
            rows,
            dtype.columns(HIDDEN),
        )


@given(
    hidden=st.integers(1, 65536),
    per_row=st.integers(1, 64),
    mode=st.sampled_from(ReplyMode),
    dtype=st.sampled_from(WireDType),
    max_rows=st.integers(1, 4096),
)
def test_rows_that_fit_do_fit(
    hidden: int, per_row: int, mode: ReplyMode, dtype: WireDType, max_rows: int
) -> None:
    """That many rows stay within every limit, and one more would break one."""
    rows = rows_that_fit(hidden, per_row, mode, dtype, max_rows)

    def fits(rows: int) -> bool:
        pairs = rows * per_row
        return (
            rows <= max_rows
            and pairs <= MAX_PAIRS
            and dispatch_size(rows, pairs, hidden, dtype) <= MAX_PAYLOAD
            and reply_size(rows, pairs, hidden, mode, dtype) <= MAX_PAYLOAD
        )

    assert fits(rows) and not fits(rows + 1)

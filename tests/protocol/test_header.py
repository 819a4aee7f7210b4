"""expert_protocol.header"""

from __future__ import annotations

import struct
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert_network.errors import LocalProtocolError, RemoteProtocolError
from expert_protocol.dtypes import WireDType
from expert_protocol.header import (
    HEADER_SIZE,
    LIMITS,
    MAX_ERROR,
    MAX_ROWS,
    VERSION,
    ErrorCode,
    Kind,
    crc_of,
    decode_header,
    encode_frame,
)

FIELDS = ["magic", "version", "kind", "flags", "sequence", "epoch", "layer", "dtype", "mode",
          "rows", "reserved", "length", "crc"]  # fmt: skip
GOOD: dict[str, Any] = {
    "magic": b"EXPN", "version": VERSION, "kind": 3, "flags": 0, "sequence": 1, "epoch": 2,
    "layer": 3, "dtype": 1, "mode": 1, "rows": 4, "reserved": 0, "length": 5, "crc": 6,
}  # fmt: skip


def packed(**changes: Any) -> bytes:
    """A header made field by field from the layout in the documents."""
    fields = GOOD | changes
    return struct.pack("<4sBBHIIHBBHHII", *(fields[name] for name in FIELDS))


def refusal(**changes: Any) -> RemoteProtocolError:
    with pytest.raises(RemoteProtocolError) as caught:
        decode_header(packed(**changes))
    return caught.value


def test_layout() -> None:
    """Each field is read from its documented offset."""
    data = packed()
    assert len(data) == HEADER_SIZE
    header = decode_header(data)
    assert header == (3, Kind.DISPATCH, 0, 1, 2, 3, 1, 1, 4, 5, 6)
    assert (data[4], data[5], data[18], data[19]) == (3, 3, 1, 1)
    assert struct.unpack_from("<I", data, 24) == (5,)


def test_crc_covers_header_and_payload() -> None:
    """The checksum runs over bytes 0..27 and then every payload buffer."""
    frame = encode_frame(Kind.GOODBYE, (b"ab", memoryview(b"cd")))
    assert len(frame) == 3
    head = bytes(frame[0])
    assert decode_header(head).crc == crc32(head[:28] + b"abcd") == crc_of(head)


def test_payload_is_not_copied() -> None:
    """The buffers given are the buffers sent."""
    part = memoryview(bytearray(10))
    assert encode_frame(Kind.GOODBYE, (part,))[1] is part


@pytest.mark.parametrize("kind", Kind)
def test_absurd_lengths(kind: Kind) -> None:
    """One byte over a kind's limit is refused as TOO_LARGE, both when read and when written."""
    rows = 1 if kind in (Kind.DISPATCH, Kind.REPLY) else 0
    plain = {"kind": kind, "rows": rows, "epoch": 0, "layer": 0, "dtype": 0, "mode": 0}
    assert decode_header(packed(**plain, length=LIMITS[kind])).length == LIMITS[kind]
    error = refusal(**plain, length=LIMITS[kind] + 1)
    assert error.code == ErrorCode.TOO_LARGE and str(LIMITS[kind]) in str(error)
    with pytest.raises(LocalProtocolError, match=str(LIMITS[kind])):
        encode_frame(kind, (bytes(LIMITS[kind] + 1),))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"magic": b"HTTP"}, "48 54 54 50"),
        ({"kind": 0}, "kind 0"),
        ({"kind": 9}, "kind 9"),
        ({"flags": 4}, "flags"),
        ({"reserved": 1}, "reserved"),
        ({"dtype": 4}, "dtype 4"),
        ({"mode": 2}, "mode 2"),
        ({"rows": 0}, "without rows"),
    ],
)
def test_refused_fields(changes: dict[str, Any], words: str) -> None:
    """Each field out of its range is refused, and the sentence says which."""
    error = refusal(**changes)
    assert error.code == ErrorCode.PROTOCOL and words in str(error)


def test_too_many_rows() -> None:
    """More rows than the limit are TOO_LARGE."""
    assert decode_header(packed(rows=MAX_ROWS)).rows == MAX_ROWS
    assert refusal(rows=MAX_ROWS + 1).code == ErrorCode.TOO_LARGE


@pytest.mark.parametrize("field", ["epoch", "layer", "dtype", "mode", "rows"])
@pytest.mark.parametrize("kind", [Kind.HELLO, Kind.WELCOME, Kind.PING, Kind.WORKING, Kind.GOODBYE])
def test_other_kinds_leave_the_dispatch_fields_zero(kind: Kind, field: str) -> None:
    """A field that means nothing for a kind must be zero, so that it can mean something later."""
    plain = {"kind": kind, "epoch": 0, "layer": 0, "dtype": 0, "mode": 0, "rows": 0, "length": 0}
    decode_header(packed(**plain))
    assert "belong to a dispatch" in str(refusal(**(plain | {field: 1})))


def test_a_pong_carries_an_epoch() -> None:
    """The answer to a PING may have an epoch, and nothing else of a dispatch's."""
    fields = {"kind": Kind.PING, "flags": 1, "layer": 0, "dtype": 0, "mode": 0, "rows": 0}
    assert decode_header(packed(**fields, epoch=7, length=0)).epoch == 7
    assert "belong to a dispatch" in str(refusal(**(fields | {"layer": 1}), epoch=7, length=0))


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("flags", [1, 2, 3, 4, 1 << 15])
def test_flags(kind: Kind, flags: int) -> None:
    """PONG on a PING, PRECISE and ADOPT on a DISPATCH; every other flag is refused."""
    fields = {"kind": kind, "flags": flags, "length": 0}
    if kind not in (Kind.DISPATCH, Kind.REPLY):
        fields |= {"epoch": 0, "layer": 0, "dtype": 0, "mode": 0, "rows": 0}
    if flags <= {Kind.PING: 1, Kind.DISPATCH: 3}.get(kind, 0):
        assert decode_header(packed(**fields)).flags == flags
    else:
        assert "flags" in str(refusal(**fields))


@pytest.mark.parametrize("kind", [Kind.DISPATCH, Kind.REPLY])
def test_exact_rows_are_not_rounded(kind: Kind) -> None:
    """int8 rows are refused in EXACT mode, and taken in SUM mode."""
    fields = {"kind": kind, "dtype": WireDType.INT8}
    assert decode_header(packed(**fields, mode=0)).dtype is WireDType.INT8
    assert "int8" in str(refusal(**fields, mode=1))


def test_another_version_is_named_with_both_numbers() -> None:
    """A frame of version 4 is refused with VERSION, and 4 and 3 are in the sentence."""
    error = refusal(version=4, kind=200)
    assert error.code == ErrorCode.VERSION
    assert "version 4" in str(error) and "version 3" in str(error)


def test_an_error_of_another_version_is_read() -> None:
    """The ERROR frame is promised stable over versions."""
    plain = {"kind": Kind.ERROR, "epoch": 0, "layer": 0, "dtype": 0, "mode": 0, "rows": 0}
    assert decode_header(packed(**plain, version=7, length=MAX_ERROR)).version == 7


@pytest.mark.parametrize("changes", [{"sequence": -1}, {"epoch": 2**32}, {"layer": 65536}])
def test_a_field_the_header_cannot_carry_is_our_fault(changes: dict[str, int]) -> None:
    """Out-of-range fields of our own raise LocalProtocolError."""
    with pytest.raises(LocalProtocolError, match="cannot carry"):
        encode_frame(Kind.DISPATCH, (), rows=1, **changes)


@given(
    sequence=st.integers(0, 2**32 - 1),
    epoch=st.integers(0, 2**32 - 1),
    layer=st.integers(0, 65535),
    dtype=st.integers(0, 2),
    mode=st.integers(0, 1),
    rows=st.integers(1, MAX_ROWS),
    payload=st.lists(st.binary(max_size=40), max_size=4),
)
def test_round_trip(payload: list[bytes], **fields: int) -> None:
    """Every header that may be sent is read back as it was."""
    (head, *_) = encode_frame(Kind.DISPATCH, payload, **fields)
    header = decode_header(head)
    assert {name: getattr(header, name) for name in fields} == fields
    assert header.length == len(b"".join(payload))
    assert header.crc == crc32(b"".join(payload), crc32(head[:28]))


@given(st.binary(min_size=HEADER_SIZE, max_size=HEADER_SIZE))
def test_any_32_bytes(data: bytes) -> None:
    """Garbage is a header or a RemoteProtocolError, nothing else."""
    for candidate in (data, b"EXPN\x01" + data[5:], b"EXPN\x01\x03\0\0" + data[8:]):
        try:
            header = decode_header(candidate)
        except RemoteProtocolError:
            continue
        assert header.length <= LIMITS[header.kind]

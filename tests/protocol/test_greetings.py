"""expert_protocol.greetings"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert_network.errors import LocalProtocolError, RemoteProtocolError
from expert_protocol.dtypes import WireDType
from expert_protocol.greetings import (
    MAX_ITEMS,
    MAX_TEXT,
    Hello,
    Welcome,
    decode_hello,
    decode_welcome,
    encode_hello,
    encode_welcome,
)
from expert_protocol.header import MAX_CONTROL, MAX_HELLO
from tests.support.wire import DIGEST, hello, welcome

digests = st.text("0123456789abcdef", min_size=64, max_size=64)
texts = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=MAX_TEXT)
u32 = st.integers(0, 2**32 - 1)
dtypes = st.lists(st.sampled_from(WireDType), min_size=1, unique=True).map(tuple)
hellos = st.builds(
    Hello,
    protocol=st.integers(1, 65535),
    model_digest=digests,
    roster_digest=st.none() | digests,
    epoch=u32,
    dtypes=dtypes,
    numerics=texts,
    exact=st.booleans(),
    max_payload=st.integers(1, 2**32 - 1),
    peers=st.lists(texts, max_size=4).map(tuple),
)
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=10,
)
welcomes = st.builds(
    Welcome,
    protocol=st.integers(1, 65535),
    node=st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True),
    model_digest=digests,
    roster=st.dictionaries(texts, plain, max_size=4),
    roster_digest=digests,
    epoch=u32,
    numerics=texts,
    compute_dtype=texts,
    dtypes=dtypes,
    max_rows=st.integers(1, 4096),
    max_payload=st.integers(1, 2**32 - 1),
    software=texts,
)


@given(hellos)
def test_hello_round_trip(sent: Hello) -> None:
    """Every HELLO that can be sent is read as it was."""
    assert decode_hello(encode_hello(sent)) == sent


@given(welcomes)
def test_welcome_round_trip(sent: Welcome) -> None:
    """Every WELCOME that can be sent is read as it was."""
    assert decode_welcome(encode_welcome(sent)) == sent


def test_the_largest_roster_fits() -> None:
    """4096 nodes with the longest names and plain weights fit a WELCOME."""
    nodes = [[f"{number:064d}", 1 / 3] for number in range(4096)]
    sent = welcome(roster={"nodes": nodes, "replicas": 3, "epoch": 2**32 - 1})
    data = encode_welcome(sent)
    assert len(data) < MAX_CONTROL // 2
    assert decode_welcome(data) == sent


Cases = list[tuple[str, list[object]]]
HELLO_FIELDS: Cases = [
    ("protocol", [0, 65536, "1", True, 1.0, None]),
    ("model_digest", ["", "d1" * 31, "D1" * 32, "zz" * 32, None, 5, b"d" * 64]),
    ("roster_digest", ["", "d1" * 31, 5]),
    ("epoch", [-1, 2**32, "0", None, False]),
    ("dtypes", [[], ["i8"], ["f32", "f32"], "f32", None, [1], ["f32"] * 17]),
    ("numerics", ["x" * 257, "a\nb", "\x1b[2J", "é", None, 3]),
    ("exact", [0, 1, "true", None]),
    ("max_payload", [0, -1, 2**32, "64", None]),
]
WELCOME_FIELDS: Cases = [
    *(item for item in HELLO_FIELDS if item[0] not in ("exact", "roster_digest")),
    ("node", ["", "x" * 65, "a b", "a/b", "a\n", None, 5]),
    ("roster", [None, [], "a", 5]),
    ("roster_digest", [None, "", "d1" * 31]),
    ("compute_dtype", ["x" * 257, "\x00", None]),
    ("max_rows", [0, 4097, None, "1"]),
    ("software", ["x" * 257, "\x7f", None]),
]


def as_map(greeting: Hello | Welcome) -> dict[str, Any]:
    encoded = encode_hello(greeting) if isinstance(greeting, Hello) else encode_welcome(greeting)
    found: dict[str, Any] = msgpack.unpackb(encoded)
    return found


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in HELLO_FIELDS for value in values]
)
def test_hello_fields_are_checked(key: str, value: object) -> None:
    """Each field of a HELLO out of its bounds is refused by name."""
    with pytest.raises(RemoteProtocolError, match=rf"HELLO .*({key}|exceeds max_)"):
        decode_hello(msgpack.packb(as_map(hello()) | {key: value}))


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in WELCOME_FIELDS for value in values]
)
def test_welcome_fields_are_checked(key: str, value: object) -> None:
    """Each field of a WELCOME out of its bounds is refused by name."""
    with pytest.raises(RemoteProtocolError, match=rf"WELCOME .*({key}|exceeds max_)"):
        decode_welcome(msgpack.packb(as_map(welcome()) | {key: value}))


@pytest.mark.parametrize("sample", [hello(), welcome()])
def test_every_key_is_needed(sample: Hello | Welcome) -> None:
    """A greeting without any one of its keys is refused, and the key is named."""
    decode = decode_hello if isinstance(sample, Hello) else decode_welcome
    whole = as_map(sample)
    for key in whole:
        less = {name: value for name, value in whole.items() if name != key}
        with pytest.raises(RemoteProtocolError, match=f"{key} is missing"):
            decode(msgpack.packb(less))


def test_unknown_keys_and_dtypes_are_ignored() -> None:
    """A later release may say more without a new protocol version."""
    later = as_map(hello()) | {"mood": ["good"], "dtypes": ["f8", "bf16", 9]}
    assert decode_hello(msgpack.packb(later)) == hello(dtypes=(WireDType.BF16,))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc0",
        msgpack.packb([1, 2]),
        msgpack.packb({}) + b"x",
        msgpack.packb({1: 2}),
        msgpack.packb({"a": "x" * (MAX_TEXT + 1)}),
        msgpack.packb({"a": b"x"}),
        msgpack.packb({"a": [0] * (MAX_ITEMS + 1)}),
        msgpack.packb({"a": msgpack.ExtType(5, b"x")}),
        msgpack.packb({"a": msgpack.Timestamp(0)}),
        b"\x91" * 5000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xa2\xff\xfe",
        bytes(MAX_HELLO + 1),
    ],
)
def test_refused_msgpack(data: bytes) -> None:
    """Anything but one bounded map with text keys is refused, before memory is taken for it."""
    with pytest.raises(RemoteProtocolError, match="HELLO is not understood"):
        decode_hello(data)


@pytest.mark.parametrize(
    "value",
    [
        "x" * (MAX_TEXT + 1),
        b"x",
        [0] * (MAX_ITEMS + 1),
        {str(number): 0 for number in range(MAX_ITEMS + 1)},
        {1: 2},
        msgpack.ExtType(5, b"x"),
        msgpack.Timestamp(0),
    ],
)
def test_bounds_hold_inside_of_a_roster(value: object) -> None:
    """What the roster's own reader has yet to look at is bounded already."""
    good = as_map(welcome())
    decode_welcome(msgpack.packb(good | {"roster": {"nodes": [0] * MAX_ITEMS}}))
    with pytest.raises(RemoteProtocolError, match="WELCOME is not understood"):
        decode_welcome(msgpack.packb(good | {"roster": {"nodes": value}}))


@given(st.binary(max_size=300))
def test_any_bytes(data: bytes) -> None:
    """Garbage is a greeting or a RemoteProtocolError, nothing else."""
    for decode in (decode_hello, decode_welcome):
        with pytest.raises(RemoteProtocolError):
            decode(data)


@given(plain, st.sampled_from(sorted(as_map(welcome()))))
def test_any_value_in_any_field(value: object, key: str) -> None:
    """Whatever stands in a field, the greeting is read or refused."""
    for decode, sample in ((decode_hello, hello()), (decode_welcome, welcome())):
        with suppress(RemoteProtocolError):
            decode(msgpack.packb(as_map(sample) | {key: value}))


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_any_byte_changed(at: int, byte: int) -> None:
    """A greeting with any byte replaced is read or refused."""
    data = bytearray(encode_welcome(welcome()))
    data[at % len(data)] = byte
    with suppress(RemoteProtocolError):
        decode_welcome(bytes(data))


@pytest.mark.parametrize(
    "wrong",
    [
        hello(model_digest="short"),
        hello(dtypes=()),
        hello(epoch=2**32),
        hello(numerics="a\nb"),
        welcome(node="a b"),
        welcome(roster={1: 2}),
        welcome(roster={"a": object()}),
        welcome(roster={"a": b"bytes"}),
        welcome(roster={"a": "x" * 257}),
        welcome(roster={"a": 2**80}),
        welcome(roster={"a": ["x" * 250] * 8000}),
        replace(welcome(), max_rows=0),
    ],
)
def test_a_greeting_the_peer_would_refuse_is_our_fault(wrong: Hello | Welcome) -> None:
    """It is not sent: LocalProtocolError."""
    with pytest.raises(LocalProtocolError):
        encode_hello(wrong) if isinstance(wrong, Hello) else encode_welcome(wrong)


def test_no_digest_is_a_digest() -> None:
    """A driver may not know the roster; it always knows the model."""
    assert decode_hello(encode_hello(hello(roster_digest=None))).roster_digest is None
    assert decode_hello(encode_hello(hello())).model_digest == DIGEST

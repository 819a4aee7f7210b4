"""HELLO and WELCOME: what the two ends tell each other before the first dispatch, in msgpack.

A key that this version does not know is ignored; one that is missing or out of its bounds is
refused. That is how a later release may add to a greeting without a new protocol version.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

import msgpack

from expert_network.errors import LocalProtocolError, RemoteProtocolError
from expert_protocol.dtypes import WireDType
from expert_protocol.header import MAX_CONTROL, MAX_HELLO, MAX_PAYLOAD, MAX_ROWS, MAX_U32

#: Longest string anywhere in a greeting: numerics ids and node names are far shorter.
MAX_TEXT = 256
#: Most entries of one list or map: a roster of 4096 nodes, flat.
MAX_ITEMS = 8192
#: Most peers that a HELLO names; with the longest texts they fill half of it.
MAX_PEERS = 128

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TEXT = re.compile(r"[ -~]{0,256}")


@dataclass(frozen=True, slots=True)
class Hello:
    """The driver's first frame. `exact`: it will ask for EXACT replies.

    peers: addresses from which the node may take blocks that it is to adopt.
    """

    protocol: int
    model_digest: str
    roster_digest: str | None
    epoch: int
    dtypes: tuple[WireDType, ...]
    numerics: str
    exact: bool
    max_payload: int = MAX_PAYLOAD
    peers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Welcome:
    """The node's answer. `roster` is Roster.to_wire(), not looked into here."""

    protocol: int
    node: str
    model_digest: str
    roster: Mapping[str, Any]
    roster_digest: str
    epoch: int
    numerics: str
    compute_dtype: str
    dtypes: tuple[WireDType, ...]
    max_rows: int = MAX_ROWS
    max_payload: int = MAX_PAYLOAD
    software: str = ""


def encode_hello(hello: Hello) -> bytes:
    """A HELLO's payload. Raises LocalProtocolError for a value that the peer would refuse."""
    return _encode(hello, _HELLO, MAX_HELLO)


def decode_hello(payload: memoryview | bytes) -> Hello:
    """Raises RemoteProtocolError for anything that is not a HELLO."""
    return Hello(**_decode("HELLO", payload, _HELLO, MAX_HELLO))


def encode_welcome(welcome: Welcome) -> bytes:
    """A WELCOME's payload. Raises LocalProtocolError for a value that the peer would refuse."""
    return _encode(welcome, _WELCOME, MAX_CONTROL)


def decode_welcome(payload: memoryview | bytes) -> Welcome:
    """Raises RemoteProtocolError for anything that is not a WELCOME."""
    return Welcome(**_decode("WELCOME", payload, _WELCOME, MAX_CONTROL))


Check = Callable[[object], object]


def _integer(low: int, high: int) -> Check:
    def check(value: object) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"is not a whole number from {low} to {high}")
        return value

    return check


def _text(pattern: re.Pattern[str], what: str) -> Check:
    def check(value: object) -> str:
        if not isinstance(value, str) or pattern.fullmatch(value) is None:
            raise ValueError(f"is not {what}")
        return value

    return check


def _optional(inner: Check) -> Check:
    return lambda value: None if value is None else inner(value)


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("is neither true nor false")
    return value


def _dtypes(value: object) -> tuple[WireDType, ...]:
    labels = {dtype.label: dtype for dtype in WireDType}
    if not isinstance(value, list) or len(value) > 16:
        raise ValueError("is not a short list of dtypes")
    known = tuple(labels[label] for label in value if isinstance(label, str) and label in labels)
    if not known or len(set(known)) != len(known):
        raise ValueError("names no dtype known here, or one of them twice")
    return known


def _peers(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MAX_PEERS:
        raise ValueError(f"is not a list of at most {MAX_PEERS} addresses")
    return tuple(cast(str, _printable(url)) for url in value)


def _map(value: object) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError("is not a map with text keys")
    return value


_digest = _text(_DIGEST, "a sha256 in hexadecimal")
_printable = _text(_TEXT, f"printable ASCII of at most {MAX_TEXT} characters")
_u32 = _integer(0, MAX_U32)

_HELLO: dict[str, Check] = {
    "protocol": _integer(1, 65535),
    "model_digest": _digest,
    "roster_digest": _optional(_digest),
    "epoch": _u32,
    "dtypes": _dtypes,
    "numerics": _printable,
    "exact": _boolean,
    "max_payload": _integer(1, MAX_U32),
    "peers": _peers,
}
_WELCOME: dict[str, Check] = {
    "protocol": _integer(1, 65535),
    "node": _text(_NAME, "a node's name"),
    "model_digest": _digest,
    "roster": _map,
    "roster_digest": _digest,
    "epoch": _u32,
    "numerics": _printable,
    "compute_dtype": _printable,
    "dtypes": _dtypes,
    "max_rows": _integer(1, MAX_ROWS),
    "max_payload": _integer(1, MAX_U32),
    "software": _printable,
}


def _encode(greeting: Hello | Welcome, checks: Mapping[str, Check], limit: int) -> bytes:
    values: dict[str, object] = {f.name: getattr(greeting, f.name) for f in fields(greeting)}
    values["dtypes"] = [dtype.label for dtype in greeting.dtypes]
    try:
        data = cast(bytes, msgpack.packb(values, use_bin_type=True))
        _read(data, checks, limit)  # as the peer will
    except (ValueError, TypeError, OverflowError) as error:
        raise LocalProtocolError(f"this greeting cannot be sent: {error}") from error
    return data


def _decode(
    name: str, payload: memoryview | bytes, checks: Mapping[str, Check], limit: int
) -> dict[str, Any]:
    try:
        return _read(payload, checks, limit)
    except ValueError as error:
        raise RemoteProtocolError(f"the {name} is not understood: {error}") from error


def _read(payload: memoryview | bytes, checks: Mapping[str, Check], limit: int) -> dict[str, Any]:
    """The checked fields; ValueError for anything else."""
    return _checked(_map(_unpack(payload, limit)), checks)


def _checked(values: Mapping[str, object], checks: Mapping[str, Check]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, check in checks.items():
        if key not in values:
            raise ValueError(f"{key} is missing")
        try:
            found[key] = check(values[key])
        except ValueError as error:
            raise ValueError(f"{key} {error}") from None
    return found


def _unpack(payload: memoryview | bytes, limit: int) -> object:
    """One msgpack value and nothing after it; ValueError for anything else."""
    if len(payload) > limit:
        raise ValueError(f"{len(payload)} bytes are over the limit of {limit}")
    return cast(
        object,
        msgpack.unpackb(
            payload,
            raw=False,
            strict_map_key=True,
            max_str_len=MAX_TEXT,
            max_bin_len=0,
            max_ext_len=0,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
        ),
    )

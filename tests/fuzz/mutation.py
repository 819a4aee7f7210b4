"""Inputs that are nearly right: valid ones, changed at the level at which they are read."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any
from zlib import crc32

import msgpack

from expert_protocol.header import HEADER_SIZE, SUMMED_SIZE

#: Makes one input out of valid ones.
Mutator = Callable[[Random, Sequence[bytes]], bytes]

_NUMBERS = (0, 1, 2, 3, 7, 8, 63, 64, 127, 128, 255, 256, 4095, 4096, 4097, 32767, 65535)
_WIDE = (0, 1, 31, 32, 1 << 16, (1 << 26) - 1, 1 << 26, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
#: Where a header's numbers stand, and how wide they are.
_FIELDS = ((4, "B"), (5, "B"), (6, "<H"), (8, "<I"), (12, "<I"), (16, "<H"), (18, "B"), (19, "B"),
           (20, "<H"), (22, "<H"), (24, "<I"))  # fmt: skip
_ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 255, 65536, 1 << 31, 1 << 63, (1 << 64) - 1, -(1 << 63), 0.0, -0.0,
    1.5, 1e308, float("inf"), float("-inf"), float("nan"), "", "a", "a" * 300, "\x00", "é", "..",
    "/", "\ud800", [], {}, [[]], {"": None}, [0, 0], ["a", "b"],
)  # fmt: skip
_SYNTAX = b"\r\n\t\0 \"'{}[]()<>,;:=/\\?&%+-.#"


def noise(random: Random) -> bytes:
    """Bytes without any sense."""
    return random.randbytes(random.choice((0, 1, 3, 8, 31, 32, 33, 100, 300)))


def mutated_bytes(random: Random, seeds: Sequence[bytes]) -> bytes:
    """A valid input with a few of its bytes changed, left out, repeated or moved."""
    data = bytearray(random.choice(seeds))
    for _ in range(random.choice((1, 1, 1, 2, 3, 8))):
        at = random.randrange(len(data) + 1)
        span = slice(at, at + random.choice((1, 1, 2, 4, 16, 64)))
        match random.randrange(8):
            case 0 if data:
                data[at % len(data)] ^= 1 << random.randrange(8)
            case 1 if data:
                data[at % len(data)] = random.randrange(256)
            case 2 if data:
                data[at % len(data)] = random.choice(_SYNTAX)
            case 3:
                del data[span]
            case 4:
                data[at:at] = data[span] * random.choice((1, 2, 50))
            case 5:
                data[at:at] = noise(random)[:8]
            case 6:
                del data[at:]
            case _:
                data[at:] = random.choice(seeds)[at:]
    return bytes(data)


def mutated_frame(random: Random, seeds: Sequence[bytes]) -> bytes:
    """A frame with a field or its payload changed; its length and crc32 mostly made right."""
    data = bytearray(random.choice(seeds))
    payload = bytes(data[HEADER_SIZE:])
    if random.random() < 0.6:
        for _ in range(random.choice((1, 1, 2, 3))):
            at, form = random.choice(_FIELDS)
            size = struct.calcsize(form)
            value = random.choice(_NUMBERS + _WIDE) & ((1 << 8 * size) - 1)
            struct.pack_into(form, data, at, value)
    else:
        payload = mutated_bytes(random, [payload])
        if random.random() < 0.8:
            struct.pack_into("<I", data, 24, len(payload))
    head = bytes(data[:SUMMED_SIZE])
    crc = crc32(payload, crc32(head)) if random.random() < 0.9 else random.randrange(1 << 32)
    return head + struct.pack("<I", crc) + payload


def mutated_json(random: Random, seeds: Sequence[bytes]) -> bytes:
    """A JSON text with values changed; now and then with wrong syntax."""
    value = _changed(random, json.loads(random.choice(seeds)))
    options = {"sort_keys": True, "separators": (",", ":")} if random.random() < 0.8 else {}
    data = _dumped(value, options)
    return mutated_bytes(random, [data]) if random.random() < 0.2 else data


def mutated_msgpack(random: Random, seeds: Sequence[bytes]) -> bytes:
    """A msgpack value with values changed; now and then with wrong bytes."""
    value = _changed(random, msgpack.unpackb(random.choice(seeds)))
    try:
        data = bytes(msgpack.packb(value, unicode_errors="surrogatepass"))
    except (OverflowError, ValueError):
        data = random.choice(seeds)
    return mutated_bytes(random, [data]) if random.random() < 0.3 else data


def _dumped(value: Any, options: dict[str, Any]) -> bytes:
    try:
        return json.dumps(value, **options).encode()
    except TypeError:  # keys of several types cannot be sorted
        return json.dumps(value).encode()


def _changed(random: Random, value: Any) -> Any:
    """The value with one to three of its parts replaced, left out, doubled or added to."""
    for _ in range(random.choice((1, 1, 2, 3))):
        value = _change(random, value)
    return value


def _change(random: Random, value: Any) -> Any:
    if isinstance(value, dict) and value and random.random() < 0.9:
        key = random.choice(list(value))
        match random.randrange(12):
            case 0:
                return {k: v for k, v in value.items() if k != key}
            case 1:
                return {**value, random.choice(("", "x", "a.b", "../x", "é")): value[key]}
            case _:
                return {**value, key: _change(random, value[key])}
    if isinstance(value, list) and value and random.random() < 0.9:
        at = random.randrange(len(value))
        match random.randrange(12):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return value + value[at:]
            case 2:
                return value[::-1]
            case _:
                return [*value[:at], _change(random, value[at]), *value[at + 1 :]]
    if type(value) is int and random.random() < 0.5:
        return value + random.choice((-1, 1, 7, 64, -value, value, 1 << 32))
    if isinstance(value, str) and value and random.random() < 0.5:
        text = mutated_bytes(random, [value.encode(errors="surrogatepass")])
        return text.decode("latin-1" if random.random() < 0.3 else "ascii", "replace")
    return random.choice(_ODD)

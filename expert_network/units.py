"""Sizes and durations as people write them. Decimal units: 1 GB is 10**9 bytes."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)


def size(count: int | float) -> str:
    """`count` bytes for a person: 16384 -> '16.4 KB'."""
    sign, value = ("-", -count) if count < 0 else ("", count)
    if value < 1000:
        return f"{sign}{int(value)} B"
    for unit in ("KB", "MB", "GB"):
        value /= 1000
        if value < 999.95:
            return f"{sign}{value:.1f} {unit}"
    return f"{sign}{value / 1000:.1f} TB"


def parse_size(text: str) -> int:
    """Bytes from '8GB', '512 MiB' or '1000'. Raises ValueError with the accepted forms."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size; write it like 8GB, 512MiB or 1000000")
    number, unit, binary = match.groups()
    factor = _BINARY.get(unit.upper(), 1) if binary else _UNITS[unit.upper()]
    return int(float(number) * factor)


def duration(seconds: float) -> str:
    """`seconds` for a person: 0.0032 -> '3.2 ms', 75 -> '1 min 15 s'."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"

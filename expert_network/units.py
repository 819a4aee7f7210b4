"""Sizes and durations as people write them. Decimal units: 1 GB is 10**9 bytes."""

from __future__ import annotations


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

"""The owner order written a second time, plainly: one block, one node at a time, no numpy."""

from __future__ import annotations

import hashlib
import math

from expert_roster.roster import Roster

_MASK = 2**64 - 1


def mix(x: int) -> int:
    """SplitMix64 on Python integers."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def unmix(y: int) -> int:
    """The x with mix(x) == y, to reach the ends of the range."""
    y = _unshift(y, 31) * pow(0x94D049BB133111EB, -1, 2**64) & _MASK
    y = _unshift(y, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) & _MASK
    return (_unshift(y, 30) - 0x9E3779B97F4A7C15) & _MASK


def _unshift(y: int, bits: int) -> int:
    x = y
    for _ in range(64 // bits):
        x = y ^ (x >> bits)
    return x


def score(name: str, weight: float, layer: int, expert: int) -> float:
    """A node's score for a block."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    bits = mix(int.from_bytes(digest, "big") ^ mix(layer << 16 | expert))
    return -weight / math.log(((bits >> 12) + 0.5) / 2**52)


def owner_order(roster: Roster, layer: int, expert: int) -> list[str]:
    """Names, best first."""
    ranked = [(-score(name, weight, layer, expert), name) for name, weight in roster.nodes]
    return [name for _, name in sorted(ranked)]

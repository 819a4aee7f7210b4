"""A node's proof of what it computes with: the hash of a nonce and of a block's bytes in memory.

The nonce is the asker's and new each time, so no answer can be kept ready from when the bytes were
right.
"""

from __future__ import annotations

import hashlib
import re

from expert_network.errors import InputError

#: Bytes.
MIN_NONCE, MAX_NONCE = 16, 64

_HEX = re.compile(r"([0-9a-f]{2})+")


def proof(nonce: bytes, block: bytes | memoryview) -> str:
    """sha256 (hex) of `nonce` and then the block as the store has it."""
    digest = hashlib.sha256(nonce)
    digest.update(block)
    return digest.hexdigest()


def read_nonce(text: str) -> bytes:
    """A nonce as it stands in a request. Raises InputError for one that is none."""
    if _HEX.fullmatch(text) is None or not MIN_NONCE <= len(text) // 2 <= MAX_NONCE:
        raise InputError(
            f"a nonce has {MIN_NONCE} to {MAX_NONCE} bytes, written in lower-case hexadecimal."
        )
    return bytes.fromhex(text)

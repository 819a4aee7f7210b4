"""expert_network.net.checksum: the same numbers as zlib's."""

from __future__ import annotations

import random
import zlib

import numpy as np
import pytest

from expert_network.net.checksum import crc32


@pytest.mark.parametrize("least", [0, 4096, 300_000])
def test_as_zlib_sums(least: int) -> None:
    """Every length around those where the way of summing changes, going on from any crc32."""
    source = random.Random(least)
    for size in range(least, least + 150):
        data = memoryview(source.randbytes(size + 3))[3:]
        start = source.getrandbits(32)
        assert crc32(data, start) == zlib.crc32(data, start)


def test_rows_as_they_are() -> None:
    """A contiguous buffer of any form is summed as its bytes."""
    rows = np.arange(600, dtype=np.uint16).reshape(2, 300)
    assert crc32(rows.data, 7) == zlib.crc32(rows.tobytes(), 7)

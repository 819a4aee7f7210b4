"""Weights on large pages."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from expert_network import large_pages

SIZE = 32 << 20
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def large_bytes() -> int:
    """Of this process's memory, what is on large pages."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    return 0


def private() -> NDArray[np.uint8]:
    """Memory of this process alone, of which no page has been touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return np.frombuffer(mmap.mmap(-1, SIZE, flags=flags), np.uint8)


def memory() -> NDArray[np.uint8]:
    """Memory that the kernel has given in small pages, filled with numbers."""
    data = private()
    data[:] = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)
    return data


def test_what_memory_holds_stays() -> None:
    """Moving memory to large pages changes no byte of it, at any address and size."""
    data = memory()
    before = data.copy()
    for start, stop in ((0, SIZE), (4097, SIZE - 5), (3, 900), (1 << 20, 3 << 20)):
        large_pages.use(data[start:stop])
    assert np.array_equal(data, before)


def test_zeros_stay_zeros_and_their_neighbours_what_they_are() -> None:
    """Memory of zeros is zeros afterwards and can be written to; what lies beside it stays."""
    data = memory()
    before = data.copy()
    zeros = data[5 << 20 : 21 << 20]
    zeros[:] = 0
    large_pages.use_for_zeros(zeros)
    assert not zeros.any()
    zeros[:] = before[5 << 20 : 21 << 20]
    assert np.array_equal(data, before)


@pytest.mark.skipif(
    sys.platform != "linux" or not SETTING.exists() or "[never]" in SETTING.read_text(),
    reason="this kernel gives no large pages",
)
def test_zeros_get_large_pages() -> None:
    """What is written to memory of zeros lies on large pages, for the most part."""
    data = private()
    data[:] = 0
    before = large_bytes()
    large_pages.use_for_zeros(data)
    data[:] = 1
    assert large_bytes() - before >= SIZE // 2

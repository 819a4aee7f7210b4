"""Weights on large pages."""

from __future__ import annotations

import mmap
import re
import sys
from pathlib import Path
from platform import release

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.linear import Linear
from numpy.typing import NDArray

from expert_network import large_pages
from expert_network.model.matrices import matrix_of

SIZE = 32 << 20
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


needs_large_pages = pytest.mark.skipif(
    sys.platform != "linux"
    or not SETTING.exists()
    or "[never]" in SETTING.read_text()
    or tuple(map(int, re.findall(r"\d+", release())[:2])) < (6, 1),
    reason="this kernel gives no large pages when it is asked",
)


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


@needs_large_pages
def test_what_is_used_lies_on_large_pages() -> None:
    """Memory that the kernel gave in small pages is on large ones afterwards, for the most part."""
    data = memory()
    before = large_bytes()
    large_pages.use(data)
    assert large_bytes() - before >= SIZE // 2


@needs_large_pages
def test_weights_of_native_kernels_lie_on_large_pages() -> None:
    """Whatever matrix the kernels are given, its memory is moved."""
    layer = Linear(4096, SIZE // 4096 // 4, bias=False)
    mx.eval(layer.weight)
    before = large_bytes()
    matrix = matrix_of(layer)
    assert matrix is not None and large_bytes() - before >= SIZE // 2

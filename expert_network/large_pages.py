"""Weights on large pages, where Linux leaves that to programs.

Processors fetch ahead within a page only, and look each page up. At the speed of memory one of
4 KiB lasts 150 ns, and one of 2 MiB 80 us. On other systems nothing is done here.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from numpy.typing import NDArray

_LARGE = 2 << 20  # bytes: of x86-64, and of Arm with pages of 4 KiB
# What madvise is told, as Linux numbers it. Before 6.1 there is no collapsing: the kernel may do it
# later by itself.
_HUGEPAGE, _COLLAPSE = 14, 25


def use(memory: NDArray[Any]) -> None:
    """Move what `memory` (contiguous) holds to large pages, as far as the kernel likes."""
    address = memory.ctypes.data
    start, end = -(-address // _LARGE) * _LARGE, (address + memory.nbytes) // _LARGE * _LARGE
    if sys.platform != "linux" or end <= start:
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for advice in (_HUGEPAGE, _COLLAPSE):
        madvise(start, end - start, advice)

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
# What madvise is told, as Linux numbers it. Kernels before 6.1 refuse to collapse.
_DONTNEED, _HUGEPAGE, _COLLAPSE = 4, 14, 25


def use(memory: NDArray[Any]) -> None:
    """Move what `memory` (contiguous) holds to large pages, as far as the kernel likes."""
    _advise(memory, _HUGEPAGE, _COLLAPSE)


def use_for_zeros(memory: NDArray[Any]) -> None:
    """The same for `memory` that is all zeros: its pages come when they are written to.

    It must be memory that nothing but this process sees, such as an allocator's.
    """
    _advise(memory, _DONTNEED, _HUGEPAGE)


def _advise(memory: NDArray[Any], *advice: int) -> None:
    address = memory.ctypes.data
    start, end = -(-address // _LARGE) * _LARGE, (address + memory.nbytes) // _LARGE * _LARGE
    if sys.platform != "linux" or end <= start:
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for value in advice:
        madvise(start, end - start, value)

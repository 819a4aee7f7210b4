"""Rows on their way to the wire and back: rounded, widened, added up, and looked through.

Each function passes over the values once, in the native kernels where they are there, and says
whether all of them are finite. Without the kernels the dtype's own NumPy code does the same.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from expert_network import kernels

Floats = NDArray[np.float32]
Raw = NDArray[Any]

_native: Any = kernels if kernels.available() and hasattr(kernels, "accumulate") else None


class RowDType(Protocol):
    """What rows travel as, as expert_protocol.dtypes has it."""

    raw: np.dtype[Any]
    label: str

    def columns(self, hidden: int, /) -> int:
        """Elements of `raw` in a row of `hidden` values."""

    def hidden(self, columns: int, /) -> int:
        """Values of a row that has so many elements of `raw`."""

    def encode(self, values: Floats, /) -> Raw:
        """`values` (R, D) rounded, as raw (R, columns(D))."""

    def decode(self, raw: Raw, /) -> Floats:
        """`raw` (R, columns(D)) as float32 (R, D)."""

    def finite(self, raw: Raw, /) -> bool:
        """Whether no value of `raw` is a NaN or an infinity."""


def encode(values: Floats, dtype: RowDType) -> tuple[Raw, bool]:
    """`values` (R, D) as they travel, raw (R, columns(D)), and whether all of that is finite."""
    if _native is None:
        raw = dtype.encode(values)
        return raw, dtype.finite(raw)
    raw = np.empty((len(values), dtype.columns(values.shape[1])), dtype.raw)
    return raw, _native.encode(values, dtype.label, raw)


def decode(raw: Raw, dtype: RowDType) -> tuple[Floats, bool]:
    """`raw` (R, columns(D)) as float32 (R, D), and whether all of it is finite."""
    if _native is None:
        return dtype.decode(raw), dtype.finite(raw)
    values = np.empty((len(raw), dtype.hidden(raw.shape[1])), np.float32)
    return values, _native.decode(raw, dtype.label, values)


def add(total: Floats, rows: NDArray[np.intp] | None, raw: Raw, dtype: RowDType) -> bool:
    """Add `raw` (R, columns(D)) to the `rows` of total (N, D), None for all of them in order.

    False if not all of it is finite: `total` is of no use then. No two `rows` are the same.
    """
    if _native is not None:
        finite: bool = _native.accumulate(total, rows, raw, dtype.label)
        return finite
    if not dtype.finite(raw):
        return False
    values = dtype.decode(raw)
    if rows is None:
        total += values
    else:
        total[rows] += values
    return True

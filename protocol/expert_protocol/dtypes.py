"""What a row's values travel as: float32, bfloat16 or float16, little-endian.

numpy has no bfloat16, so its raw form is uint16: the upper half of a float32's bits.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float32Array = NDArray[np.float32]
#: float32, float16, or uint16 for bfloat16: whatever `WireDType.raw` says.
RawArray = NDArray[Any]

_EXPONENT = np.uint16(0x7F80)
_QUIET = np.uint32(0x40)
_HALF = np.uint32(16)
_ONE = np.uint32(1)
_BELOW_TIE = np.uint32(0x7FFF)


class WireDType(IntEnum):
    """The dtype of the rows in a frame. Numbers are on the wire."""

    F32 = (0, "<f4")
    BF16 = (1, "<u2")
    F16 = (2, "<f2")

    #: The numpy dtype that holds these bits.
    raw: np.dtype[Any]
    #: Bytes per value.
    itemsize: int
    #: The short name, as in HELLO and in `--wire`.
    label: str

    def __new__(cls, number: int, raw: str) -> WireDType:
        member = int.__new__(cls, number)
        member._value_ = number
        member.raw = np.dtype(raw)
        member.itemsize = member.raw.itemsize
        return member

    def __init__(self, number: int, raw: str) -> None:
        self.label = self.name.lower()

    @classmethod
    def from_label(cls, label: str) -> WireDType:
        """ "f32", "bf16" or "f16". Raises ValueError that lists them."""
        try:
            return cls[label.upper()]
        except KeyError:
            known = ", ".join(dtype.label for dtype in cls)
            raise ValueError(f"{label!r} is not a wire dtype; known are {known}") from None

    @classmethod
    def for_compute(cls, name: str) -> WireDType:
        """The dtype that carries a compute dtype ("float32", "bfloat16", "float16") unchanged."""
        try:
            return _COMPUTE[name]
        except KeyError:
            raise ValueError(f"{name!r} is not a dtype that rows travel as") from None

    def encode(self, values: Float32Array) -> RawArray:
        """`values` (any shape) rounded to nearest even; the same memory if this is float32.

        A NaN stays a NaN. What float16 cannot hold becomes an infinity, which `finite` finds.
        """
        if self is WireDType.F32:
            return np.ascontiguousarray(values, self.raw)
        if self is WireDType.BF16:
            return _to_bf16(np.ascontiguousarray(values, np.float32))
        with np.errstate(over="ignore", invalid="ignore"):
            return np.ascontiguousarray(values, self.raw)

    def decode(self, raw: RawArray) -> Float32Array:
        """`raw` (any shape) as float32, exactly; the same memory if this is float32."""
        if self is WireDType.F32:
            return raw.astype(np.float32, copy=False)
        if self is WireDType.BF16:
            bits = raw.astype(np.uint32)
            bits <<= _HALF
            return bits.view(np.float32)
        with np.errstate(invalid="ignore"):
            return raw.astype(np.float32)


_COMPUTE = {"float32": WireDType.F32, "bfloat16": WireDType.BF16, "float16": WireDType.F16}


def _to_bf16(values: Float32Array) -> RawArray:
    bits = values.view(np.uint32)
    rounded = bits >> _HALF
    rounded &= _ONE
    rounded += _BELOW_TIE
    rounded += bits
    rounded >>= _HALF
    raw = rounded.astype(np.uint16)
    nan = np.isnan(values)
    if np.count_nonzero(nan):  # rounding may have carried a NaN into an infinity or past the sign
        raw[nan] = (bits[nan] >> _HALF) | _QUIET
    return raw


def finite(rows: RawArray, dtype: WireDType) -> bool:
    """Whether no value of `rows` (raw, any shape) is a NaN or an infinity."""
    if dtype is WireDType.BF16:
        return not np.count_nonzero((rows & _EXPONENT) == _EXPONENT)
    return bool(np.count_nonzero(np.isfinite(rows)) == rows.size)

"""What a row's values travel as: float32, bfloat16, float16 or blocks of int8, little-endian.

numpy has no bfloat16, so its raw form is uint16: the upper half of a float32's bits.

int8: the raw form of a row of D values is row_bytes(D) uint8. First the D values, int8, in order;
then a scale for each block of 64 of them (the last block may be shorter), bfloat16, in order.
Value i is int8[i] * scale[i // 64], exactly, in float32. Encoding a block, all of it in float32,
rounding to nearest, ties to even:

    largest = the largest |x| of the block;  scale = bf16(largest / 127);  q = rint(x * (1 / scale))

so that |q| <= 127 needs no clipping, and no error is over half a scale. If largest / 127 is below
2**-100, scale and q are all 0. If it is over 2**120 or not finite, scale is the NaN 0x7fc0 and q
all 0. A scale that is negative, over 2**120 or a NaN is what `finite` finds and a receiver refuses.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float32Array = NDArray[np.float32]
#: float32, float16, uint16 for bfloat16 or uint8 for int8: whatever `WireDType.raw` says.
RawArray = NDArray[Any]

#: Values that share a scale in int8 rows: what most models' weights are quantized by.
BLOCK = 64
_SCALE = np.dtype("<u2")

_EXPONENT = np.uint16(0x7F80)
_QUIET = np.uint32(0x40)
_HALF = np.uint32(16)
_ONE = np.uint32(1)
_BELOW_TIE = np.uint32(0x7FFF)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_LARGEST = np.float32(127)
_LOWEST_SCALE = np.float32(2.0**-100)
_HIGHEST_SCALE = np.float32(2.0**120)
#: 2**120 as bfloat16. Compared as unsigned, a negative scale is over it too.
_HIGHEST_BITS = np.uint16(0x7B80)
_NO_SCALE = np.uint16(0x7FC0)


class WireDType(IntEnum):
    """The dtype of the rows in a frame. Numbers are on the wire."""

    F32 = (0, "<f4")
    BF16 = (1, "<u2")
    F16 = (2, "<f2")
    INT8 = (3, "u1")

    #: The numpy dtype that holds these bits.
    raw: np.dtype[Any]
    #: The short name, as in HELLO and in `--wire`.
    label: str

    def __new__(cls, number: int, raw: str) -> WireDType:
        member = int.__new__(cls, number)
        member._value_ = number
        member.raw = np.dtype(raw)
        return member

    def __init__(self, number: int, raw: str) -> None:
        self.label = self.name.lower()

    @classmethod
    def from_label(cls, label: str) -> WireDType:
        """ "f32", "bf16", "f16" or "int8". Raises ValueError that lists them."""
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

    def columns(self, hidden: int) -> int:
        """Elements of `raw` in a row of `hidden` values."""
        return hidden + 2 * -(-hidden // BLOCK) if self is WireDType.INT8 else hidden

    def hidden(self, columns: int) -> int:
        """Values of a row that has so many elements of `raw`."""
        return columns - 2 * -(-columns // (BLOCK + 2)) if self is WireDType.INT8 else columns

    def row_bytes(self, hidden: int) -> int:
        """Bytes of a row of `hidden` values."""
        return self.columns(hidden) * self.raw.itemsize

    def encode(self, values: Float32Array) -> RawArray:
        """`values` (..., D) rounded, as raw (..., columns(D)); the same memory if it is float32.

        A NaN stays a NaN. What float16 cannot hold becomes an infinity, and a block that int8
        cannot hold becomes NaN: `finite` finds both.
        """
        if self is WireDType.F32:
            return np.ascontiguousarray(values, self.raw)
        if self is WireDType.BF16:
            return _to_bf16(np.ascontiguousarray(values, np.float32))
        if self is WireDType.INT8:
            return _to_int8(np.ascontiguousarray(values, np.float32))
        with np.errstate(over="ignore", invalid="ignore"):
            return np.ascontiguousarray(values, self.raw)

    def decode(self, raw: RawArray) -> Float32Array:
        """`raw` (..., columns(D)) as float32 (..., D), exactly; the same memory if it is that."""
        if self is WireDType.F32:
            return raw.astype(np.float32, copy=False)
        if self is WireDType.BF16:
            return _from_bf16(raw)
        if self is WireDType.INT8:
            return _from_int8(raw)
        with np.errstate(invalid="ignore"):
            return raw.astype(np.float32)

    def finite(self, raw: RawArray) -> bool:
        """Whether no value of `raw` (any shape) is a NaN or an infinity."""
        return finite(raw, self)


_COMPUTE = {"float32": WireDType.F32, "bfloat16": WireDType.BF16, "float16": WireDType.F16}


def finite(rows: RawArray, dtype: WireDType) -> bool:
    """Whether no value of `rows` (raw, any shape) is a NaN or an infinity."""
    if dtype is WireDType.BF16:
        return not np.count_nonzero((rows & _EXPONENT) == _EXPONENT)
    if dtype is WireDType.INT8:
        return not np.count_nonzero(_split(rows)[1] > _HIGHEST_BITS)
    return bool(np.count_nonzero(np.isfinite(rows)) == rows.size)


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


def _from_bf16(raw: RawArray) -> Float32Array:
    bits = raw.astype(np.uint32)
    bits <<= _HALF
    return bits.view(np.float32)


def _to_int8(values: Float32Array) -> RawArray:
    *lead, hidden = values.shape
    blocks = _blocks(values)
    # As bits: an infinity or a NaN is then the largest of its block.
    largest = (blocks.view(np.uint32) & _MAGNITUDE).max(axis=-1).view(np.float32)
    with np.errstate(all="ignore"):
        wanted = largest / _LARGEST
        scales = _to_bf16(wanted)
        scales[wanted < _LOWEST_SCALE] = 0
        scales[~(wanted <= _HIGHEST_SCALE)] = _NO_SCALE
        inverse = np.float32(1) / _from_bf16(scales)
        inverse[~np.isfinite(inverse)] = 0
        quantized = np.rint(blocks * inverse[..., None])
        quantized[inverse == 0] = 0
    raw = np.empty((*lead, WireDType.INT8.columns(hidden)), np.uint8)
    flat = quantized.astype(np.int8).view(np.uint8).reshape(*lead, blocks.shape[-2] * BLOCK)
    raw[..., :hidden] = flat[..., :hidden]
    raw[..., hidden:] = scales.astype(_SCALE, copy=False).view(np.uint8)
    return raw


def _blocks(values: Float32Array) -> Float32Array:
    """(..., D) as (..., blocks, BLOCK), the last one filled up with zeros."""
    *lead, hidden = values.shape
    count = -(-hidden // BLOCK)
    if hidden != count * BLOCK:
        padded = np.zeros((*lead, count * BLOCK), np.float32)
        padded[..., :hidden] = values
        values = padded
    return values.reshape(*lead, count, BLOCK)


def _from_int8(raw: RawArray) -> Float32Array:
    quantized, scales = _split(raw)
    *lead, hidden = quantized.shape
    values = quantized.astype(np.float32)
    factors = _from_bf16(scales)
    if hidden % BLOCK:
        return values * np.repeat(factors, BLOCK, axis=-1)[..., :hidden]
    blocks = values.reshape(*lead, hidden // BLOCK, BLOCK)
    blocks *= factors[..., None]
    return values


def _split(raw: RawArray) -> tuple[NDArray[np.int8], NDArray[np.uint16]]:
    """The values (..., D) and scales (..., blocks) of int8 rows, as views."""
    at = WireDType.INT8.hidden(raw.shape[-1])
    return raw[..., :at].view(np.int8), raw[..., at:].view(_SCALE)

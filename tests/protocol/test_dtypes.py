"""expert_protocol.dtypes"""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert_protocol.dtypes import BLOCK, Float32Array, WireDType, finite

EDGES = [
    0x00000000, 0x80000000,  # zeros
    0x00000001, 0x80000001, 0x007FFFFF, 0x00008000, 0x00018000,  # subnormals, with ties
    0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001,  # ties to even, and their neighbours
    0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000, 0x7F7F7FFF,  # rounds up to infinity, or just not
    0x7F800000, 0xFF800000,  # infinities
    0x7F800001, 0xFF800001, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F80FFFF,  # NaNs
]  # fmt: skip

bit_patterns = st.integers(0, 2**32 - 1) | st.sampled_from(EDGES)


def from_bits(bits: list[int]) -> Float32Array:
    return np.array(bits, np.uint32).view(np.float32)


def slow_bf16(bits: int) -> int | None:
    """The nearest bfloat16 by comparing exact distances, ties to the even one; None for a NaN."""
    (value,) = struct.unpack("<f", struct.pack("<I", bits))
    if math.isnan(value):
        return None
    sign, low = bits >> 31 << 15, (bits & 0x7FFFFFFF) >> 16
    if math.isinf(value):
        return sign | low

    def magnitude(raw: int) -> float:
        # What would follow the largest finite value stands for infinity when rounding.
        if raw == 0x7F80:
            return 2.0**128
        (found,) = struct.unpack("<f", struct.pack("<I", raw << 16))
        return float(found)

    below = abs(value) - magnitude(low)
    above = magnitude(low + 1) - abs(value)
    if below == above:
        return sign | (low if low % 2 == 0 else low + 1)
    return sign | (low if below < above else low + 1)


@given(st.lists(bit_patterns, min_size=1, max_size=50))
def test_bf16_matches_the_slow_reference(bits: list[int]) -> None:
    """Encoding picks the nearest bfloat16, ties to even; a NaN stays a NaN."""
    raw = WireDType.BF16.encode(from_bits(bits))
    for pattern, found in zip(bits, raw.tolist(), strict=True):
        expected = slow_bf16(pattern)
        if expected is None:
            assert found & 0x7F80 == 0x7F80 and found & 0x7F
        else:
            assert found == expected


@pytest.mark.parametrize("bits", EDGES)
def test_bf16_edges(bits: int) -> None:
    """Each edge alone, so that no neighbour hides it."""
    found = int(WireDType.BF16.encode(from_bits([bits]))[0])
    expected = slow_bf16(bits)
    assert found == expected if expected is not None else np.isnan(from_bits([found << 16]))[0]


def test_every_bf16_survives() -> None:
    """Decode then encode gives the same 16 bits back for all but quieted NaNs."""
    raw = np.arange(65536, dtype=np.uint16)
    again = WireDType.BF16.encode(WireDType.BF16.decode(raw))
    nan = np.isnan(WireDType.BF16.decode(raw))
    assert np.array_equal(again[~nan], raw[~nan])
    assert np.array_equal(again[nan], raw[nan] | 0x40)


@pytest.mark.parametrize("dtype", WireDType)
@given(bits=st.lists(bit_patterns, min_size=1, max_size=50))
def test_round_trip_is_stable(dtype: WireDType, bits: list[int]) -> None:
    """A second trip changes nothing: what was rounded once stays."""
    once = dtype.decode(dtype.encode(from_bits(bits)))
    twice = dtype.decode(dtype.encode(once))
    np.testing.assert_array_equal(once, twice)
    assert once.dtype == np.float32


@pytest.mark.parametrize("dtype", WireDType)
@given(bits=st.lists(bit_patterns, max_size=50))
def test_finite_sees_every_nan_and_infinity(dtype: WireDType, bits: list[int]) -> None:
    """finite() agrees with numpy on the decoded values."""
    raw = dtype.encode(from_bits(bits))
    assert finite(raw, dtype) == bool(np.isfinite(dtype.decode(raw)).all())


def test_f16_overflow_becomes_infinite() -> None:
    """A value beyond float16 is found by finite() and raises no warning."""
    raw = WireDType.F16.encode(np.array([1e6, 1.0], np.float32))
    assert not finite(raw, WireDType.F16)


# int8


def near_bf16(value: Fraction) -> Fraction:
    """The nearest bfloat16 of a positive number, ties to even, by whole numbers alone."""
    exponent = math.floor(math.log2(value)) - 7
    return round(value / Fraction(2) ** exponent) * Fraction(2) ** exponent


def slow_int8(block: list[float]) -> tuple[list[int], Fraction]:
    """A block's int8 values and its scale: each exact value to the nearest step, ties to even."""
    largest = max(abs(Fraction(value)) for value in block)
    if largest / 127 < Fraction(2) ** -100:
        return [0] * len(block), Fraction(0)
    scale = near_bf16(Fraction(float(np.float32(float(largest)) / np.float32(127))))
    inverse = np.float32(1) / np.float32(float(scale))
    return [round(Fraction(float(np.float32(v) * inverse))) for v in block], scale


moderate = st.floats(-(2.0**60), 2.0**60, width=32) | st.floats(-1, 1, width=32)


@given(st.lists(moderate, min_size=1, max_size=200))
def test_int8_matches_the_slow_reference(values: list[float]) -> None:
    """Values and scales are those of the recipe, block by block, with a short last block."""
    raw = WireDType.INT8.encode(np.array(values, np.float32))
    assert raw.shape == (WireDType.INT8.row_bytes(len(values)),)
    blocks = [values[at : at + BLOCK] for at in range(0, len(values), BLOCK)]
    expected = [slow_int8(block) for block in blocks]
    assert raw[: len(values)].view(np.int8).tolist() == [q for qs, _ in expected for q in qs]
    scales = WireDType.BF16.decode(raw[len(values) :].view("<u2")).tolist()
    assert scales == [float(scale) for _, scale in expected]
    decoded = [q * float(scale) for qs, scale in expected for q in qs]
    assert WireDType.INT8.decode(raw).tolist() == decoded


@given(st.lists(bit_patterns, min_size=1, max_size=70))
def test_int8_errs_by_half_a_step(bits: list[int]) -> None:
    """No finite value is off by more than half of its block's scale, which is a 127th."""
    values = from_bits(bits)
    largest = np.abs(values[:BLOCK]).max()
    if not np.isfinite(values).all() or not 2.0**-90 < largest < 2.0**120:
        return
    found = WireDType.INT8.decode(WireDType.INT8.encode(values))
    error = np.abs(found[:BLOCK].astype(np.float64) - values[:BLOCK]).max()
    assert error <= float(largest) / 253


def test_int8_tells_apart_what_it_cannot_carry() -> None:
    """A block with a NaN, an infinity or a value over 127 * 2**120 is NaN, and only that block."""
    for value in (np.nan, -np.inf, 3.4e38):
        rows = np.ones((2, 130), np.float32)
        rows[1, 70] = value
        raw = WireDType.INT8.encode(rows)
        bad = np.isnan(WireDType.INT8.decode(raw))
        assert bad[1, 64:128].all() and bad.sum() == 64
        assert finite(raw[:1], WireDType.INT8) and not finite(raw, WireDType.INT8)


@pytest.mark.parametrize("scale", [0x8000, 0xBF80, 0x7B81, 0x7F80, 0x7FC0, 0xFF80])
def test_int8_scales_of_another_kind_are_refused(scale: int) -> None:
    """A peer's scale that is negative, too large, infinite or a NaN is not finite."""
    raw = WireDType.INT8.encode(np.ones((1, 65), np.float32))
    assert finite(raw, WireDType.INT8)
    raw[0, 67:] = (scale & 255, scale >> 8)
    assert not finite(raw, WireDType.INT8)


def test_int8_zeros_and_dust() -> None:
    """A block of zeros, and one too small to matter, are zeros that are finite."""
    for value in (0.0, -0.0, 1e-38, 1e-45):
        raw = WireDType.INT8.encode(np.full(64, value, np.float32))
        assert not raw.any() and finite(raw, WireDType.INT8)


def test_f32_is_not_copied() -> None:
    """float32 rows travel from the memory they are in."""
    rows = np.ones((2, 4), np.float32)
    assert np.shares_memory(WireDType.F32.encode(rows), rows)
    assert np.shares_memory(WireDType.F32.decode(rows), rows)


@pytest.mark.parametrize("dtype", WireDType)
def test_strided_rows_encode(dtype: WireDType) -> None:
    """A transposed array encodes to the same values, contiguous."""
    rows = np.arange(12, dtype=np.float32).reshape(3, 4).T
    raw = dtype.encode(rows)
    assert raw.flags.c_contiguous and raw.shape == (4, dtype.columns(3))
    np.testing.assert_array_equal(raw, dtype.encode(rows.copy()))
    np.testing.assert_allclose(dtype.decode(raw), rows, atol=0.05)


def test_names() -> None:
    """Labels, compute dtypes and sizes are those of the documents."""
    assert [(d.label, int(d), d.row_bytes(100)) for d in WireDType] == [
        ("f32", 0, 400),
        ("bf16", 1, 200),
        ("f16", 2, 200),
        ("int8", 3, 104),
    ]
    assert all(WireDType.from_label(d.label) is d for d in WireDType)
    assert all(d.hidden(d.columns(width)) == width for d in WireDType for width in range(1, 300))
    assert WireDType.for_compute("bfloat16") is WireDType.BF16
    with pytest.raises(ValueError, match="f32, bf16, f16, int8"):
        WireDType.from_label("int4")
    with pytest.raises(ValueError, match="float64"):
        WireDType.for_compute("float64")

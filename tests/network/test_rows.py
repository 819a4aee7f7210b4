"""expert_network.net.rows: with the native kernels and without."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from expert_network.net import rows
from expert_protocol.dtypes import WireDType

VALUES = np.random.default_rng(3).normal(size=(5, 200)).astype(np.float32)
DTYPES = list(WireDType)


@pytest.fixture(params=["native", "numpy"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways, where both are there."""
    if request.param == "numpy":
        monkeypatch.setattr(rows, "_native", None)
    elif rows._native is None:
        pytest.skip("the native kernels are not built")


@pytest.mark.parametrize("dtype", DTYPES)
def test_as_the_dtype_says(dtype: WireDType) -> None:
    """Encoding, decoding and adding give the bits that the dtype's definition gives."""
    raw, finite = rows.encode(VALUES, dtype)
    assert finite and raw.dtype == dtype.raw
    assert np.array_equal(raw, dtype.encode(VALUES))
    values, finite = rows.decode(raw, dtype)
    assert finite and np.array_equal(values, dtype.decode(raw))
    for some in (None, np.array([7, 0, 3, 4, 9])):
        total = np.ones((5 if some is None else 10, VALUES.shape[1]), np.float32)
        expected = total.copy()
        expected[np.arange(5) if some is None else some] += values
        assert rows.add(total, some, raw, dtype)
        assert np.array_equal(total, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("at", [(0, 0), (4, 199)])
def test_what_is_not_finite_is_found(dtype: WireDType, value: float, at: tuple[int, int]) -> None:
    """One bad value anywhere is found on all three ways; so is one that the dtype cannot hold."""
    values = VALUES.copy()
    values[at] = value
    fits = value == 3e38 and dtype in (WireDType.F32, WireDType.BF16)
    raw, finite = rows.encode(values, dtype)
    assert finite is fits
    assert rows.decode(raw, dtype)[1] is fits
    total: Any = np.zeros(values.shape, np.float32)
    assert rows.add(total, None, raw, dtype) is fits

"""The native linear layer, against MLX's own unpacking multiplied in float64."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from expert_network import kernels
from tests.network.kernel_cases import (
    AFFINE,
    MXFP4,
    PLAIN,
    QUANTIZED,
    Format,
    error,
    linear,
    random_weight,
)

if not kernels.available():
    pytest.skip(kernels.reason(), allow_module_level=True)

# Rows of weights and cols that are no multiple of a block, a chunk or a panel, and one that is.
SHAPES = [(37, 1), (5, 3), (64, 33), (9, 65)]
# Groups' values over 127 steps, and weights of 4 bits and more: about half a step of error.
INT8_ERROR = 0.02


@pytest.fixture(params=kernels.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that runs here."""
    before = kernels.isa()
    kernels.use_isa(request.param)
    yield request.param
    kernels.use_isa(before)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """The number of threads is the process's: put it back."""
    before = kernels.threads()
    kernels.set_threads(2)
    yield
    kernels.set_threads(before)


@pytest.mark.parametrize("form", [*PLAIN, *QUANTIZED], ids=str)
def test_every_format(form: Format, isa: str) -> None:
    """A product in float32 is within 1e-5 of the exact one, in every format and odd shape."""
    rng = np.random.default_rng(0)
    for rows, groups in SHAPES:
        cols = groups * (form.group_size or 31)
        matrix, values, bias = random_weight(form, (rows, cols), rng, bias=groups == 3)
        for n in (1, 2, 3, 7):
            x = rng.normal(size=(n, cols)).astype(np.float32)
            assert error(linear(matrix, x), x @ values.T + bias) < 1e-5, (rows, cols, n)


@pytest.mark.parametrize("form", QUANTIZED, ids=str)
def test_int8_error(form: Format, isa: str) -> None:
    """With int8 activations a product is within 2 % of the exact one."""
    rng = np.random.default_rng(1)
    matrix, values, bias = random_weight(form, (70, 9 * form.group_size), rng, bias=True)
    x = rng.normal(size=(5, matrix.cols)).astype(np.float32)
    assert error(linear(matrix, x, kernels.INT8), x @ values.T + bias) < INT8_ERROR


@pytest.mark.parametrize("form", QUANTIZED, ids=str)
def test_int8_is_exact_on_integers(form: Format, isa: str) -> None:
    """Activations that are whole steps of int8 lose nothing by it."""
    rng = np.random.default_rng(2)
    matrix, values, bias = random_weight(form, (19, 70 * form.group_size), rng)
    x = rng.integers(-127, 128, (4, matrix.cols)).astype(np.float32)
    x[:, :: form.group_size] = 127
    assert error(linear(matrix, x, kernels.INT8), x @ values.T + bias) < 1e-5


@pytest.mark.parametrize("precision", [kernels.F32, kernels.INT8])
@pytest.mark.parametrize("form", [*PLAIN, *QUANTIZED], ids=str)
def test_a_row_is_alone(form: Format, precision: int, isa: str, two_threads: None) -> None:
    """A row has the same bits alone, among 70, in any place, and with one thread or two."""
    rng = np.random.default_rng(3)
    for groups in (1, 3, 35, 67):
        cols = groups * (form.group_size or 31)
        matrix, _, _ = random_weight(form, (43, cols), rng, bias=True)
        x = rng.normal(size=(70, cols)).astype(np.float32)
        kernels.set_threads(2)
        among = linear(matrix, x, precision)
        kernels.set_threads(1)
        for rows in (slice(0, 1), slice(69, 70), slice(30, 32), slice(31, 36), slice(0, 70)):
            assert np.array_equal(linear(matrix, x[rows], precision), among[rows]), (groups, rows)


def test_many_rows_of_a_wide_matrix(isa: str) -> None:
    """More rows than are computed at once, and columns beyond a chunk, come out right."""
    rng = np.random.default_rng(4)
    matrix, values, bias = random_weight(AFFINE[7], (130, 4096 + 64), rng, bias=True)
    x = rng.normal(size=(201, matrix.cols)).astype(np.float32)
    assert error(linear(matrix, x), x @ values.T + bias) < 1e-5
    assert error(linear(matrix, x, kernels.INT8), x @ values.T + bias) < INT8_ERROR


@pytest.mark.parametrize("precision", [kernels.F32, kernels.INT8])
def test_what_is_not_finite_stays_so(precision: int, isa: str) -> None:
    """NaN and infinity in a row are seen in what comes out of it, and of no other row."""
    rng = np.random.default_rng(5)
    matrix, _, _ = random_weight(AFFINE[7], (20, 256), rng)
    x = rng.normal(size=(4, 256)).astype(np.float32)
    x[1, 100], x[3, 7] = np.nan, np.inf
    finite = np.isfinite(linear(matrix, x, precision)).all(axis=1)
    assert finite.tolist() == [True, False, True, False]


@pytest.mark.parametrize("precision", [kernels.F32, kernels.INT8])
def test_zeros_and_extremes(precision: int, isa: str) -> None:
    """Rows of zeros give zeros, and very small and large ones neither NaN nor infinity."""
    rng = np.random.default_rng(6)
    matrix, values, _ = random_weight(MXFP4, (20, 256), rng)
    x = np.stack([np.zeros(256), np.full(256, 1e-42), np.full(256, 1e30)]).astype(np.float32)
    out = linear(matrix, x, precision)
    assert not out[0].any()
    assert np.isfinite(out).all()
    assert error(out[2:], x[2:] @ values.T) < INT8_ERROR


def test_no_rows() -> None:
    """A product of no rows does nothing."""
    matrix, _, _ = random_weight(MXFP4, (8, 64), np.random.default_rng(7))
    assert linear(matrix, np.empty((0, 64), np.float32)).shape == (0, 8)

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from expert_network import transfer
from expert_network.backend import detect
from expert_network.transfer import PinnedTransfer, Transfer, transfer_for
from tests.support.threads import on_a_thread

NAME = detect("mlx").name
DTYPES = ("float32", "float16", "uint32", "uint16", "int8", "uint8")


def some(dtype: str, *shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    return np.random.default_rng(4).integers(0, 100, shape).astype(dtype)


def test_the_backend_decides() -> None:
    """Only CUDA takes the way over pinned memory, and only where there is some."""
    assert type(transfer_for("mlx-cpu")) is type(transfer_for("mlx-metal")) is Transfer
    found = transfer_for("mlx-cuda")
    assert isinstance(found, PinnedTransfer) == (NAME == "mlx-cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (3, 5), (7,), (300, 700)])
def test_values_come_back(dtype: str, shape: tuple[int, ...]) -> None:
    """Whatever is put is fetched again, short or long, odd sizes beside even ones."""
    moving = transfer_for(NAME)
    values = some(dtype, *shape), some("float32", 3, 2), some("uint8", 5)
    arrays = moving.put(*values)
    assert [array.shape for array in arrays] == [value.shape for value in values]
    assert [str(array.dtype) for array in arrays] == [f"mlx.core.{v.dtype}" for v in values]
    for fetched, value in zip(moving.fetch(*arrays), values, strict=True):
        assert fetched.dtype == value.dtype
        assert np.array_equal(fetched, value)


def test_values_may_change_afterwards() -> None:
    """What was put is not what the caller writes into its memory next."""
    moving, value = transfer_for(NAME), some("float32", 4, 16)
    expected = value.copy()
    (first,) = moving.put(value)
    value[:] = -1
    (second,) = moving.put(value)
    assert np.array_equal(moving.fetch(first + 0)[0], expected)
    assert np.array_equal(moving.fetch(second + 0)[0], value)
    assert np.array_equal(moving.fetch(first + 0)[0], expected)


def test_fetched_values_stay() -> None:
    """What was fetched does not change with the next call; parts of arrays come as parts."""
    moving = transfer_for(NAME)
    rows = mx.arange(64).reshape(4, 16)
    first = moving.fetch(rows + 0)[0]
    assert np.array_equal(moving.fetch((rows * 2)[1:3, 1:])[0], np.asarray(rows)[1:3, 1:] * 2)
    assert np.array_equal(first, np.arange(64).reshape(4, 16))


def test_threads_take_turns() -> None:
    """One transfer serves threads that come one after the other, as a node's links do."""
    moving, value = transfer_for(NAME), some("float32", 1, 64)

    def there_and_back() -> bool:
        (array,) = moving.put(value)
        return bool(np.array_equal(moving.fetch(array + 1)[0], value + 1))

    assert all(on_a_thread(there_and_back) for _ in range(3))


@pytest.mark.skipif(NAME != "mlx-cuda", reason="pinned memory is for CUDA")
def test_long_and_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too long for pinned memory, or too slow to be watched: the values are right all the same."""
    moving = PinnedTransfer()
    for name, value in (("WATCH_S", 0.0), ("PINNED_BYTES", 100)):
        monkeypatch.setattr(transfer, name, value)
        values = some("float32", 100, 100)
        (array,) = moving.put(values)
        assert np.array_equal(moving.fetch(array * 2)[0], values * 2)

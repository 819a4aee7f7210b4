from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from expert_network import transfer
from expert_network.backend import detect
from expert_network.transfer import PinnedTransfer, Transfer, transfer_for
from tests.support.threads import on_a_thread

NAME = detect("mlx").name


class Device:
    """Stands in for the driver and our kernels: what they do with memory, done by the host.

    `reads` is whether a put's arrays read the inbox at once, or only when `read` is called.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads = True
        self.launches: list[tuple[str, int]] = []
        self.freed = 0
        self._boxes: dict[int, Any] = {}
        self._unread: list[Any] = []
        monkeypatch.setattr("ctypes.CDLL", lambda _: self)
        monkeypatch.setattr(transfer._Pinned, "_take", self._take)
        monkeypatch.setattr(transfer, "_fetch_kernel", lambda count: self._fetch)
        monkeypatch.setattr(transfer, "_put_kernel", lambda count: self._put)

    def cuMemFreeHost(self, address: object) -> int:
        self.freed += 1
        return 0

    def read(self) -> None:
        """Do what was put off."""
        for header in self._unread:
            header[0] += 1
        self._unread.clear()

    @staticmethod
    def _take(box: Any, capacity: int) -> None:
        box._memory = np.zeros(64 + capacity, np.uint8)
        box.header = box._memory[:64].view(np.uint32)
        box.address, box._plans = box, {}

    def _fetch(self, *, inputs: Any, grid: Any, **_: Any) -> list[mx.array]:
        *arrays, box = inputs
        self.launches.append(("fetch", grid[0]))
        place = 64
        for size, array in zip(box.header[1:].tolist(), arrays, strict=False):
            data = np.asarray(mx.contiguous(array)).tobytes()
            assert size == len(data)
            box._memory[place : place + size] = np.frombuffer(data, np.uint8)
            place += -(-size // 16) * 16
        box.header[0] += 1
        return [mx.zeros(16)]

    def _put(
        self, *, inputs: Any, output_shapes: Any, output_dtypes: Any, grid: Any, **_: Any
    ) -> list[mx.array]:
        (box,) = inputs
        self.launches.append(("put", grid[0]))
        made, place, sizes = [], 64, box.header[1:].tolist()
        for size, shape, dtype in zip(sizes, output_shapes, output_dtypes, strict=False):
            raw = mx.array(box._memory[place : place + size].copy())
            made.append(raw.view(dtype).reshape(shape))
            place += -(-size // 16) * 16
        if self.reads:
            box.header[0] += 1
        else:
            self._unread.append(box.header)
        return made


@pytest.fixture(params=["here", "device"])
def moving(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Transfer:
    """What moves values here, and the way over pinned memory with a device that we play."""
    if request.param == "here":
        return transfer_for(NAME)
    if NAME == "mlx-cuda":
        pytest.skip("there is a real device")
    Device(monkeypatch)
    return PinnedTransfer()


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
def test_values_come_back(moving: Transfer, dtype: str, shape: tuple[int, ...]) -> None:
    """Whatever is put is fetched again, short or long, odd sizes beside even ones."""
    values = some(dtype, *shape), some("float32", 3, 2), some("uint8", 5)
    arrays = moving.put(*values)
    assert [array.shape for array in arrays] == [value.shape for value in values]
    assert [str(array.dtype) for array in arrays] == [f"mlx.core.{v.dtype}" for v in values]
    for fetched, value in zip(moving.fetch(*arrays), values, strict=True):
        assert fetched.dtype == value.dtype
        assert np.array_equal(fetched, value)


def test_values_may_change_afterwards(moving: Transfer) -> None:
    """What was put is not what the caller writes into its memory next."""
    value = some("float32", 4, 16)
    expected = value.copy()
    (first,) = moving.put(value)
    value[:] = -1
    (second,) = moving.put(value)
    assert np.array_equal(moving.fetch(first + 0)[0], expected)
    assert np.array_equal(moving.fetch(second + 0)[0], value)
    assert np.array_equal(moving.fetch(first + 0)[0], expected)


def test_fetched_values_stay(moving: Transfer) -> None:
    """What was fetched does not change with the next call; parts of arrays come as parts."""
    rows = mx.arange(64).reshape(4, 16)
    first = moving.fetch(rows + 0)[0]
    assert np.array_equal(moving.fetch((rows * 2)[1:3, 1:])[0], np.asarray(rows)[1:3, 1:] * 2)
    assert np.array_equal(first, np.arange(64).reshape(4, 16))


def test_threads_take_turns(moving: Transfer) -> None:
    """One transfer serves threads that come one after the other, as a node's links do."""
    value = some("float32", 1, 64)

    def there_and_back() -> bool:
        (array,) = moving.put(value)
        return bool(np.array_equal(moving.fetch(array + 1)[0], value + 1))

    assert all(on_a_thread(there_and_back) for _ in range(3))


def test_short_values_take_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch whose end is watched has one block of threads; a long one has many."""
    device = Device(monkeypatch)
    moving = PinnedTransfer()
    for count in (1, 1000):
        moving.fetch(*moving.put(some("float32", count, 64)))
    one, many = 512, 512 * 64
    assert device.launches == [("put", one), ("fetch", one), ("put", many), ("fetch", many)]


def test_memory_grows_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer values get more memory, once; the longest go as MLX moves them."""
    device = Device(monkeypatch)
    moving = PinnedTransfer()
    for _ in range(3):
        for count in (1, 1000, 400):
            value = some("float32", count, 64)
            assert np.array_equal(moving.fetch(*moving.put(value))[0], value)
    assert device.freed == 2  # an outbox and an inbox
    monkeypatch.setattr(transfer, "PINNED_BYTES", 100)
    before, value = len(device.launches), some("float32", 30, 30)
    assert np.array_equal(moving.fetch(*moving.put(value))[0], value)
    assert len(device.launches) == before


def test_the_inbox_is_read_before_it_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was put and not read yet is asked for before the next values take its place."""
    device = Device(monkeypatch)
    evaluated: list[Any] = []
    moving, value = PinnedTransfer(), some("float32", 4)

    def evaluate(*arrays: Any) -> None:
        evaluated.append(arrays)
        device.read()

    monkeypatch.setattr(mx, "eval", evaluate)
    moving.put(value)
    moving.put(value)
    assert not evaluated
    device.reads = False
    first = moving.put(value)
    moving.put(value)
    assert evaluated == [(list(first),)]


def test_a_thread_that_gave_up_keeps_its_inbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lazy arrays of another thread are left alone with their memory; others get new memory."""
    device = Device(monkeypatch)
    moving, value = PinnedTransfer(), some("float32", 4)
    device.reads = False
    moving.put(value)
    before = moving._inbox
    device.reads = True

    def not_here(*_: object) -> None:
        raise RuntimeError("There is no Stream(gpu, 0) in current thread")

    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", not_here)
        (array,) = moving.put(value * 2)
    assert moving._inbox is not before
    assert not device.freed
    assert np.array_equal(np.asarray(array), value * 2)
    assert np.array_equal(moving.fetch(*moving.put(value * 3))[0], value * 3)


@pytest.mark.parametrize("pairs", [3, 8, 40_000])
def test_functions_of_values(pairs: int) -> None:
    """A function between values gives what it gives of arrays, each time, short or long."""
    moving = transfer_for(NAME)
    summed = moving.through(lambda x, ids, weights: (x[ids] * weights).sum(axis=0, keepdims=True))
    rng = np.random.default_rng(2)
    for _ in range(4):
        x, weights = rng.random(100, np.float32), rng.random(pairs, np.float32)
        ids = rng.integers(0, 100, pairs).astype(np.uint32)
        expected = (x[ids] * weights).sum(dtype=np.float64)
        np.testing.assert_allclose(summed(x, ids, weights), [expected], rtol=1e-4)


@pytest.mark.skipif(NAME != "mlx-cuda", reason="pinned memory is for CUDA")
def test_promises() -> None:
    """A promised array has the values that are written before it is evaluated."""
    moving = PinnedTransfer()
    for factor in (1, 2):
        made, place = moving.promise((1, 64))
        doubled = made * 2
        place[...] = some("float32", 1, 64) * factor
        assert np.array_equal(moving.fetch(doubled)[0], some("float32", 1, 64) * factor * 2)
    with pytest.raises(ValueError):
        moving.promise((1 << 20,))


@pytest.mark.skipif(NAME != "mlx-cuda", reason="pinned memory is for CUDA")
def test_slow_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes too long to be watched is waited for."""
    monkeypatch.setattr(transfer, "WATCH_S", 0.0)
    moving, values = PinnedTransfer(), some("float32", 100, 100)
    (array,) = moving.put(values)
    assert np.array_equal(moving.fetch(array * 2)[0], values * 2)

"""expert_network.model.host"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

from expert_network.model.deferred import Pending
from expert_network.model.host import HostArray, evaluated, floats


def values(*shape: int) -> Any:
    return np.random.default_rng(3).standard_normal(shape, dtype=np.float32)


VIEWS: dict[str, Callable[[Any], Any]] = {
    "reshape": lambda a: a.reshape(2, 12),
    "reshape to a tuple": lambda a: a.reshape((-1, 4)),
    "transpose": lambda a: a.transpose(2, 0, 1),
    "transpose all": lambda a: a.transpose(),
    "swapaxes": lambda a: a.swapaxes(-1, -2),
    "slices": lambda a: a[..., :2, 1:],
    "an index": lambda a: a[:, -1, :],
    "a number": lambda a: a[1],
    "new axis": lambda a: a[:, None],
    "astype": lambda a: a.astype(mx.float32),
    "squeeze": lambda a: a[:1].squeeze(0),
    "plus": lambda a: a + a,
    "times a number": lambda a: 3 * a,
    "minus an mx.array": lambda a: a - mx.array(values(4)),
    "an mx.array minus": lambda a: mx.array(values(4)) - a,
    "divided": lambda a: a / 7.0,
    "a number divided": lambda a: 1.0 / a,
    "plus a pending sum": lambda a: a + Pending(lambda: a, a.shape, a.dtype),
}
LAZY: dict[str, Callable[[Any], Any]] = {
    "a step": lambda a: a[..., ::2],
    "gathered": lambda a: a[:, mx.array([1, 0])],
    "float16": lambda a: a.astype(mx.float16),
    "plus float16": lambda a: a + mx.array([1.0], mx.float16),
    "a function": mx.exp,
    "reversed": lambda a: a[::-1],
    "power": lambda a: a**2,
}


@pytest.mark.parametrize("name", [*VIEWS, *LAZY])
def test_as_mlx_does(name: str) -> None:
    """Whatever is done with it, shape, dtype and bits are those of MLX; often they are at hand."""
    do = (VIEWS | LAZY)[name]
    expected, found = do(mx.array(values(2, 3, 4))), do(HostArray.of(values(2, 3, 4)))
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    at_hand = isinstance(found, HostArray) and found.host is not None
    assert at_hand == (name in VIEWS)
    assert np.array_equal(evaluated(found)[0], np.array(expected))
    # The array that MLX sees and the values at hand are the same.
    assert np.array_equal(np.array(mx.array(found) * 1), np.array(expected))


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.__iadd__(1),
        lambda a: a.__imul__(mx.array(2.0)),
        lambda a: a.__setitem__(0, 5.0),
        lambda a: a.__ipow__(2),
    ],
)
def test_changed_in_place(change: Callable[[Any], Any]) -> None:
    """After a change in place the values are MLX's, for whoever holds this array, and no other."""
    array, expected = HostArray.of(values(3, 4)), mx.array(values(3, 4))
    view = array[:2]
    change(array)
    change(expected)
    assert np.array_equal(evaluated(array)[0], np.array(expected))
    assert np.array_equal(evaluated(array + 1.0)[0], np.array(expected + 1.0))
    assert np.array_equal(evaluated(view)[0], values(3, 4)[:2])


def test_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several lazy arrays are waited for together, and those at hand not at all."""
    waits: list[int] = []
    real = cast(Any, mx.eval)

    def counted(arrays: list[mx.array]) -> None:
        waits.append(len(arrays))
        real(arrays)

    monkeypatch.setattr(mx, "eval", counted)
    held, lazy = HostArray.of(values(3)), mx.array(values(3)) + 1
    found = evaluated(held, lazy, lazy * 2)
    assert waits == [2]
    assert np.array_equal(found[2], 2 * (values(3) + 1))
    evaluated(held)
    assert waits == [2]


def test_floats() -> None:
    """Contiguous float32 stays what it is; anything else becomes it."""
    array = values(3, 4)
    assert floats(array) is array
    assert floats(array.T).flags.c_contiguous and floats(array.astype(np.float64)).dtype == "f4"

"""expert_network.model.eager"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from expert_network.model import eager
from expert_network.model.host import HostArray

eager.install()


def scores(*shape: int) -> Any:
    return 9 * np.random.default_rng(7).standard_normal(shape, dtype=np.float32)


def routes(a: mx.array) -> mx.array:
    """The experts of each row as most routers find them, in the order of their numbers."""
    chosen = mx.stop_gradient(mx.argpartition(-a, kth=3, axis=-1)[..., :4])
    return mx.sort(chosen, axis=-1)


def weights(a: mx.array) -> mx.array:
    """A router's whole work: what the chosen experts weigh, the largest last."""
    chosen = mx.argpartition(a, kth=-4, axis=-1)[..., -4:]
    found = mx.take_along_axis(mx.softmax(a, axis=-1, precise=True), chosen, axis=-1)
    return mx.sort(found / found.sum(axis=-1, keepdims=True), axis=-1)


AT_ONCE: dict[str, Callable[[mx.array], mx.array]] = {
    "softmax": lambda a: mx.softmax(a, axis=-1),
    "softmax of the last axis": lambda a: mx.softmax(a, a.ndim - 1, precise=True),
    "sigmoid": mx.sigmoid,
    "argmax": lambda a: mx.argmax(a, axis=-1),
    "argmax, kept": lambda a: mx.argmax(a, -1, True),
    "negative": lambda a: -a,
    "sum": lambda a: a.sum(axis=-1, keepdims=True),
    "sum without": lambda a: a.sum(-1),
}
TO_MLX: dict[str, Callable[[mx.array], mx.array]] = {
    "softmax of another axis": lambda a: mx.softmax(a, axis=0),
    "softmax of all": mx.softmax,
    "sum of all": lambda a: a.sum(),
    "two axes": lambda a: a.sum(axis=(0, 1)),
    "routes": routes,
    "weights": weights,
}


@pytest.mark.parametrize("name", [*AT_ONCE, *TO_MLX])
@pytest.mark.parametrize("shape", [(5, 16), (1, 1, 64), (3, 4, 16)])
def test_as_mlx_does(name: str, shape: tuple[int, ...]) -> None:
    """What is done at once differs from MLX's by rounding, and in nothing else."""
    do = (AT_ONCE | TO_MLX)[name]
    expected, found = do(mx.array(scores(*shape))), do(HostArray.of(scores(*shape)))
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert isinstance(found, HostArray) == (name in AT_ONCE)
    np.testing.assert_allclose(np.array(found), np.array(expected), rtol=1e-5, atol=1e-6)


def test_a_row_is_alone() -> None:
    """A row's routes are the same among others, equal scores in the order of their numbers."""
    rows = np.round(scores(20, 32) / 9)
    many = mx.argpartition(HostArray.of(rows), kth=3, axis=-1)
    for n, row in enumerate(rows):
        alone = mx.argpartition(HostArray.of(row[None]), kth=3, axis=-1)
        assert np.array_equal(np.array(alone)[0], np.array(many)[n])
        assert np.array_equal(np.array(alone)[0], sorted(range(32), key=lambda e: row[e]))


def test_extremes() -> None:
    """Scores of any size make probabilities, without a warning."""
    far = HostArray.of(np.array([[1e30, -1e30, 0, 88, -200]], np.float32))
    assert np.array(mx.softmax(far, axis=-1)).tolist() == [[1, 0, 0, 0, 0]]
    assert np.array(mx.sigmoid(far)).tolist() == [[1, 0, 0.5, 1, 0]]


def test_others_are_left_alone() -> None:
    """What is not at hand is MLX's affair, as before, and installing twice changes nothing."""
    before = mx.softmax
    eager.install()
    assert mx.softmax is before
    lazy = mx.softmax(mx.array(scores(2, 8)) + 1, axis=-1)
    assert not isinstance(lazy, HostArray)
    assert not isinstance(mx.sigmoid(HostArray.of(scores(3).astype(np.float16))), HostArray)

"""The functions that routers are made of, done at once where the values are at hand.

A router chooses among some dozens of experts in four small steps, and would have each layer wait
for MLX once. Replaced for the process, by the type of what they are given: for an array whose
values are not at hand these are MLX's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from expert_network.kernels import ops
from expert_network.model.host import HostArray

Host = NDArray[Any]


def install() -> None:
    """Replace them, once for the process."""
    for make in (softmax, sigmoid, argpartition, argmax, take_along_axis, sum_, stop_gradient):
        name = make.__name__.rstrip("_")
        original = getattr(mx, name)
        if getattr(original, "at_once", None) is None:
            setattr(mx, name, _dispatching(original, make))


def _dispatching(original: Any, at_once: Callable[..., mx.array | None]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        if args and type(args[0]) is HostArray:
            made = at_once(*args, **options)
            if made is not None:
                return made
        return original(*args, **options)

    call.at_once = at_once  # type: ignore[attr-defined]
    call.__name__ = original.__name__
    return call


# Each gives None for what it leaves to MLX.


def softmax(
    a: HostArray, axis: Any = None, *, precise: bool = False, stream: Any = None
) -> HostArray | None:
    values = _floats(a)
    if values is None or not _is_last(a, axis):
        return None
    out = np.empty(values.shape, np.float32)
    ops.softmax(np.ascontiguousarray(values), out)
    return HostArray.of(out)


def sigmoid(a: HostArray, *, stream: Any = None) -> HostArray | None:
    values = _floats(a)
    if values is None:
        return None
    # exp of what is not positive cannot overflow.
    powers = np.exp(-np.abs(values))
    return HostArray.of(np.where(values >= 0, 1, powers) / (1 + powers))


def argpartition(a: HostArray, kth: int, axis: Any = -1, *, stream: Any = None) -> HostArray | None:
    values = _floats(a)
    if values is None or not _is_last(a, axis):
        return None
    # In full order: which of equals comes first must not depend on the processor.
    return HostArray.of(values.argsort(axis=-1, kind="stable").astype(np.uint32))


def argmax(
    a: HostArray, axis: Any = None, keepdims: bool = False, *, stream: Any = None
) -> HostArray | None:
    values = _floats(a)
    if values is None or not _is_last(a, axis):
        return None
    return HostArray.of(values.argmax(axis=-1, keepdims=keepdims).astype(np.uint32))


def take_along_axis(
    a: HostArray, indices: mx.array, axis: Any = None, *, stream: Any = None
) -> HostArray | None:
    values, places = a.host, getattr(indices, "host", None)
    if values is None or places is None or places.ndim != values.ndim or not _is_last(a, axis):
        return None
    if values.size == values.shape[-1]:  # one row: NumPy's way takes several times as long
        return HostArray.of(values.reshape(-1)[places])
    return HostArray.of(np.take_along_axis(values, places, axis=-1))


def sum_(
    a: HostArray, axis: Any = None, keepdims: bool = False, *, stream: Any = None
) -> mx.array | None:
    return None if _floats(a) is None or not _is_last(a, axis) else a.sum(axis, keepdims)


def stop_gradient(a: HostArray, *, stream: Any = None) -> HostArray:
    return a


def _floats(a: HostArray) -> Host | None:
    return a.host if a.host is not None and a.host.dtype == np.float32 else None


def _is_last(a: mx.array, axis: Any) -> bool:
    return isinstance(axis, int) and axis in (-1, a.ndim - 1)

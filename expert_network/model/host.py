"""Arrays whose values are in memory, so that reading them waits for nothing.

MLX computes on a thread of its own, and whoever wants to read a lazy array sleeps until that is
done: 40 us and more, whatever there is to compute. Between two native kernels there is hardly more
than a reshape or a sum, and these NumPy makes at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Host = NDArray[Any]

_F32 = np.dtype(np.float32)
_BASIC = (slice, type(None), type(Ellipsis), int)


class HostArray(mx.array):
    """An mx.array with its values, `host`, at hand: None once it was changed in place.

    What it overrides gives HostArrays again, at once. Everything else sees an mx.array.
    """

    host: Host | None = None

    @classmethod
    def of(cls, values: Any) -> Self:
        """An array of these values, which must not change any more."""
        made = cls(values.data)  # in half the time of an array
        made.host = np.asarray(values)  # a sum of all is a number
        return made

    def reshape(self, *shape: Any, **options: Any) -> mx.array:
        if self.host is None or options:
            return super().reshape(*shape, **options)
        return _view(super().reshape(*shape), self.host.reshape(*shape))

    def transpose(self, *axes: Any, **options: Any) -> mx.array:
        if self.host is None or options:
            return super().transpose(*axes, **options)
        return _view(super().transpose(*axes), self.host.transpose(*axes))

    def swapaxes(self, axis1: int, axis2: int, **options: Any) -> mx.array:
        made = super().swapaxes(axis1, axis2, **options)
        return made if self.host is None else _view(made, self.host.swapaxes(axis1, axis2))

    def squeeze(self, axis: Any = None, **options: Any) -> mx.array:
        made = super().squeeze(axis, **options)
        axis = tuple(axis) if isinstance(axis, list) else axis
        return made if self.host is None else _view(made, self.host.squeeze(axis))

    def sum(self, axis: Any = None, keepdims: bool = False, **options: Any) -> mx.array:
        if self.host is None or self.host.dtype != _F32 or axis not in (-1, self.ndim - 1):
            return super().sum(axis, keepdims, **options)
        return HostArray.of(self.host.sum(axis=-1, keepdims=keepdims))

    def __neg__(self) -> mx.array:
        if self.host is None or self.host.dtype != _F32:
            return super().__neg__()
        return HostArray.of(-self.host)

    def astype(self, dtype: mx.Dtype, stream: Any = None) -> mx.array:
        return self if dtype == self.dtype else super().astype(dtype, stream)

    def __getitem__(self, index: Any) -> mx.array:
        made = super().__getitem__(index)
        if self.host is None or not _is_basic(index):
            return made
        return _view(made, self.host[index])


class Room(HostArray):
    """An array (B, H, N, D) that is written through `host`: MLX's own memory, which it must not
    hold itself, since neither would ever be freed.
    """

    @property
    def host(self) -> Host:
        return np.asarray(self)

    @host.setter
    def host(self, values: Host | None) -> None:
        """MLX changed it in place: its memory still is its own."""

    def first(self, count: int) -> HostArray:
        """The same as self[:, :, :count], in half the time."""
        host = self.host
        batch, heads, length, size = host.shape
        strides = (heads * length * size, length * size, size, 1)
        made = mx.as_strided(self, (batch, heads, count, size), strides, 0)
        return _view(made, host[:, :, :count])


def _view(made: mx.array, values: Host) -> HostArray:
    view = HostArray(made)
    view.host = values
    return view


def _is_basic(index: Any) -> bool:
    """Whether NumPy and MLX mean the same by it: numbers, slices that go forwards, ..., None."""
    for part in index if isinstance(index, tuple) else (index,):
        if type(part) not in _BASIC or (type(part) is slice and part.step not in (None, 1)):
            return False
    return True


def _at_once(name: str) -> Callable[[HostArray, Any], Any]:
    """An operator on float32 values, made by NumPy where both sides are at hand."""
    lazily = getattr(mx.array, name)
    eagerly = getattr(np.ndarray, name)

    def operate(self: HostArray, other: Any) -> Any:
        if hasattr(other, "__mlx_array__"):  # a sum that is pending
            other = other.__mlx_array__()
        left, right = self.host, _operand(other)
        if left is None or right is None or left.dtype != _F32:
            return lazily(self, other)
        return HostArray.of(eagerly(left, right))

    return operate


def _operand(other: Any) -> Host | float | None:
    if isinstance(other, HostArray):
        values = other.host
        return values if values is not None and values.dtype == _F32 else None
    if isinstance(other, mx.array):
        return evaluated(other)[0] if other.dtype == mx.float32 else None
    return other if type(other) in (int, float) else None


def _changing(name: str) -> Callable[..., Any]:
    """A method that changes the array in place: its values are then known to MLX alone."""
    change = getattr(mx.array, name)

    def then_forget(self: HostArray, *args: Any) -> Any:
        self.host = None
        return change(self, *args)

    return then_forget


def _in_place(name: str) -> Callable[..., Any]:
    """The same for arithmetic, which gives the bits that MLX does: the values stay at hand."""
    change = getattr(mx.array, f"__i{name}__")
    eagerly = getattr(np.ndarray, f"__{name}__")

    def operate(self: HostArray, other: Any) -> Any:
        left, right = self.host, _operand(other)
        changed = change(self, other)
        known = left is not None and right is not None and left.dtype == _F32
        made = eagerly(left, right) if known else None
        # What grows by broadcasting is refused by MLX already.
        changed.host = made
        return changed

    return operate


_ARITHMETIC = ("add", "sub", "mul", "truediv")
_OTHERS = ("floordiv", "matmul", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
for _name in _ARITHMETIC:
    for _kind in (f"__{_name}__", f"__r{_name}__"):
        setattr(HostArray, _kind, _at_once(_kind))
    setattr(HostArray, f"__i{_name}__", _in_place(_name))
for _name in ("__setitem__", *(f"__i{name}__" for name in _OTHERS)):
    setattr(HostArray, _name, _changing(_name))


def evaluated(*arrays: mx.array) -> tuple[Host, ...]:
    """The values of arrays, after one wait for all those that were not there yet."""
    found: list[Host | None] = []
    waiting = []
    for array in arrays:
        values = array.host if isinstance(array, HostArray) else None
        found.append(values)
        if values is None:
            waiting.append(array)
    if not waiting:
        return cast("tuple[Host, ...]", tuple(found))
    mx.eval(waiting)
    return tuple(
        np.asarray(array) if values is None else values
        for array, values in zip(arrays, found, strict=True)
    )


def floats(values: Host) -> NDArray[np.float32]:
    """The values as contiguous float32; themselves if they are."""
    return np.ascontiguousarray(values, np.float32)


def rows_of(x: mx.array) -> NDArray[np.float32]:
    """The values of x as contiguous float32."""
    values = x.host if isinstance(x, HostArray) else None
    return floats(evaluated(x.astype(mx.float32))[0] if values is None else values)

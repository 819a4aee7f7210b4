"""What an expert layer's call returns in sum mode: a result that waits to learn what it is for.

mlx-lm's blocks write `y = switch(x, ids)` and then `(y * scores[..., None]).sum(axis=-2)`. The
product tells a Deferred its weights, the sum tells it to ask for one weighted row. Every other use
turns it into the array that the switch module would have returned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeGuard, cast

import mlx.core as mx


class Experts(Protocol):
    """Whoever computes the experts of a model: this process, or nodes behind links.

    `layer` is the model's own layer number, x (N, D) the rows, ids (N, k) the experts of each row
    in routing order. No two ids of a row need differ.
    """

    def outputs(self, layer: int, x: mx.array, ids: mx.array) -> mx.array:
        """Every expert's own output, (N, k, D) in x's dtype."""

    def weighted_sum(self, layer: int, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        """The sum over k of weights (N, k, float32) times outputs: (N, D) in float32."""


class Overlapping(Experts, Protocol):
    """Experts far enough away that there is something to do meanwhile.

    Both methods ask and return at once; what they return waits, and is to be called once.
    """

    def begin_outputs(self, layer: int, x: mx.array, ids: mx.array) -> Callable[[], mx.array]:
        """Ask for `outputs`."""

    def begin_sum(
        self, layer: int, x: mx.array, ids: mx.array, weights: mx.array
    ) -> Callable[[], mx.array]:
        """Ask for `weighted_sum`."""


def overlapping(experts: Experts) -> TypeGuard[Overlapping]:
    """Whether `experts` can be asked without waiting."""
    return hasattr(experts, "begin_sum") and hasattr(experts, "begin_outputs")


class _ArrayLike:
    """Behaves as the array it becomes when it is used in a way that was not foreseen."""

    def __init__(self) -> None:
        self._made: mx.array | None = None

    def __mlx_array__(self) -> mx.array:
        if self._made is None:
            self._made = self._make()
        return self._made

    def _make(self) -> mx.array:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__mlx_array__(), name)


def _forward(name: str) -> Callable[..., Any]:
    def call(self: _ArrayLike, *args: Any) -> Any:
        return getattr(self.__mlx_array__(), name)(*args)

    return call


# Python looks operators up on the class, so __getattr__ does not see them.
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_OTHERS = ("neg", "abs", "getitem", "len", "iter", "eq", "ne", "lt", "le", "gt", "ge", "repr")
for _name in (*_OPERATORS, *(f"r{op}" for op in _OPERATORS), *_OTHERS):
    if hasattr(mx.array, f"__{_name}__"):
        setattr(_ArrayLike, f"__{_name}__", _forward(f"__{_name}__"))


class Deferred(_ArrayLike):
    """The outputs (..., k, D) of one expert layer for x (..., D) and ids (..., k).

    Where the experts overlap, its weighted sum is a Pending.
    """

    def __init__(
        self, experts: Experts, layer: int, x: mx.array, ids: mx.array, overlap: bool = False
    ) -> None:
        super().__init__()
        self.shape = (*ids.shape, x.shape[-1])
        self.ndim = ids.ndim + 1
        self.dtype = x.dtype
        self._experts, self._layer, self._overlap = experts, layer, overlap
        self._ids = ids.reshape(-1, ids.shape[-1])
        if ids.shape[:-1] != x.shape[:-1]:
            x = mx.broadcast_to(x, (*ids.shape[:-1], x.shape[-1]))
        self._rows = x.reshape(-1, x.shape[-1])

    def _make(self) -> mx.array:
        made = self._experts.outputs(self._layer, self._rows, self._ids)
        return made.reshape(self.shape)

    def __mul__(self, other: Any) -> Any:
        weights = isinstance(other, mx.array) and other.shape == (*self.shape[:-1], 1)
        return _Weighted(self, other) if weights else self.__mlx_array__() * other

    __rmul__ = __mul__

    def weighted_sum(self, weights: mx.array) -> Any:
        """(..., D): the sum over k, in the dtype that (outputs * weights).sum would have."""
        flat = weights.reshape(self._ids.shape).astype(mx.float32)
        shape = (*self.shape[:-2], self.shape[-1])
        dtype = mx.result_type(self.dtype, weights.dtype)
        asked = self._layer, self._rows, self._ids, flat
        if self._overlap:
            return Pending(cast(Overlapping, self._experts).begin_sum(*asked), shape, dtype)
        return self._experts.weighted_sum(*asked).reshape(shape).astype(dtype)


class _Weighted(_ArrayLike):
    """A Deferred times its routing weights (..., k, 1)."""

    def __init__(self, outputs: Deferred, weights: mx.array) -> None:
        super().__init__()
        self.shape, self.ndim = outputs.shape, outputs.ndim
        self.dtype = mx.result_type(outputs.dtype, weights.dtype)
        self._outputs, self._weights = outputs, weights

    def _make(self) -> mx.array:
        return self._outputs.__mlx_array__() * self._weights

    def sum(self, axis: Any = None, keepdims: bool = False) -> Any:
        if axis in (-2, self.ndim - 2) and not keepdims:
            return self._outputs.weighted_sum(self._weights)
        return self.__mlx_array__().sum(axis=axis, keepdims=keepdims)


class Pending(_ArrayLike):
    """A weighted sum that has been asked for, and is waited for when it is first used.

    What it is added to, as a shared expert's output is, begins to be computed before the wait.
    """

    def __init__(
        self, finish: Callable[[], mx.array], shape: tuple[int, ...], dtype: mx.Dtype
    ) -> None:
        super().__init__()
        self.shape, self.ndim, self.dtype = shape, len(shape), dtype
        self._finish = finish

    def _make(self) -> mx.array:
        return self._finish().reshape(self.shape).astype(self.dtype)

    def astype(self, dtype: mx.Dtype) -> Any:
        """The same in another dtype, and still pending."""
        return self if dtype == self.dtype else Pending(self.__mlx_array__, self.shape, dtype)

    def __mul__(self, other: Any) -> Any:
        """Scaled by a number it is still pending."""
        if not isinstance(other, int | float):
            return self.__mlx_array__() * other
        return Pending(lambda: self.__mlx_array__() * other, self.shape, self.dtype)

    def __add__(self, other: Any) -> Any:
        if isinstance(other, mx.array):
            mx.async_eval(other)  # type: ignore[no-untyped-call]
        return self.__mlx_array__() + other

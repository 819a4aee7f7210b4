"""mx.fast's attention, norm and rotation, and mlx-lm's KV cache, as the native kernels do them.

They are replaced for the whole process, and do what they did wherever no model of native.py is
running. MLX's own take 0.9 ms for one row of attention over 128 tokens on a CPU, and 87 ms for 128.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache
from numpy.typing import NDArray

from expert_network.kernels import ops
from expert_network.model.host import HostArray, Room, evaluated

Host = NDArray[Any]

STEP = 256  # tokens by which a cache grows at least, as mlx-lm's does

# Whether the model that runs is precise; None while none runs. Passes that take turns on one
# thread have a context each.
_precise: ContextVar[bool | None] = ContextVar("precise", default=None)


@contextmanager
def running(precise: bool) -> Iterator[None]:
    """Within, native kernels do the work; imprecise caches are float16."""
    token = _precise.set(precise)
    try:
        yield
    finally:
        _precise.reset(token)


def is_running() -> bool:
    """Whether a native model runs here."""
    return _precise.get() is not None


def install() -> None:
    """Replace the functions, once for the process."""
    if getattr(mx.fast.rope, "__module__", None) == __name__:
        return
    for name, make in (
        ("scaled_dot_product_attention", _attention),
        ("rms_norm", _rms_norm),
        ("rope", _rope),
    ):
        setattr(mx.fast, name, make(getattr(mx.fast, name)))
    setattr(KVCache, "update_and_fetch", _update_and_fetch(KVCache.update_and_fetch))  # noqa: B010


def _native(x: mx.array) -> Host | None:
    """The values of x if native kernels are to work on them."""
    if _precise.get() is None or x.dtype != mx.float32:
        return None
    return x.host if isinstance(x, HostArray) and x.host is not None else evaluated(x)[0]


def _attention(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def scaled_dot_product_attention(
        q: mx.array,
        k: mx.array,
        v: mx.array,
        *,
        scale: float,
        mask: mx.array | str | None = None,
        sinks: mx.array | None = None,
        stream: Any = None,
    ) -> mx.array:
        if _precise.get() is None or q.dtype != mx.float32:
            return original(q, k, v, scale=scale, mask=mask, sinks=sinks, stream=stream)
        array = mask if isinstance(mask, mx.array) else None
        if array is not None and array.dtype != mx.bool_:
            array = _float32(array)
        rows, keys, values, *rest = evaluated(q, k, v, *_given(array, sinks))
        out = np.empty((*rows.shape[:-1], values.shape[-1]), np.float32)
        seen = None if array is None else rest.pop(0)
        ops.attention(
            *(rows, keys, values, out, scale, mask == "causal"), seen, rest[0] if rest else None
        )
        return HostArray.of(out)

    return scaled_dot_product_attention


def _rms_norm(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def rms_norm(
        x: mx.array, weight: mx.array | None, eps: float, *, stream: Any = None
    ) -> mx.array:
        rows = _native(x)
        if rows is None:
            return original(x, weight, eps, stream=stream)
        out = np.empty(rows.shape, np.float32)
        # A weight that is there already, as most are, is read without a wait.
        ops.rms_norm(rows, None if weight is None else _float32(weight), eps, out)
        return HostArray.of(out)

    return rms_norm


def _rope(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def rope(
        a: mx.array,
        dims: int,
        *,
        traditional: bool,
        base: float | None,
        scale: float,
        offset: int | mx.array,
        freqs: mx.array | None = None,
        stream: Any = None,
    ) -> mx.array:
        rows = _native(a)
        if rows is None:
            options = {"traditional": traditional, "base": base, "scale": scale}
            return original(a, dims, **options, offset=offset, freqs=freqs, stream=stream)
        out = np.empty(rows.shape, np.float32)
        # Arrays of offsets and frequencies are mostly there, and then read without a wait.
        ops.rope(rows, out, dims, traditional, base, scale, offset, freqs)
        return HostArray.of(out)

    return rope


def _float32(array: mx.array) -> mx.array:
    return array if array.dtype == mx.float32 else array.astype(mx.float32)


def _given(*arrays: mx.array | None) -> list[mx.array]:
    return [array for array in arrays if array is not None]


# --- the KV cache


def _update_and_fetch(original: Callable[..., Any]) -> Callable[..., Any]:
    def update_and_fetch(self: Any, keys: mx.array, values: mx.array) -> Any:
        precise = _precise.get()
        if precise is None or keys.dtype != mx.float32:
            return original(self, keys, values)
        begin, end = self.offset, self.offset + keys.shape[2]
        new = evaluated(keys, values.astype(mx.float32))
        # A single head is mostly a latent one, which families multiply with more than queries.
        stored = "f32" if precise or keys.shape[1] == 1 else "f16"
        self.keys = _written(self.keys, new[0], begin, stored)
        self.values = _written(self.values, new[1], begin, stored)
        self.offset = end
        return self.keys.first(end), self.values.first(end)

    return update_and_fetch


def _written(held: mx.array | None, new: Host, begin: int, stored: str) -> Room:
    """The cache with `new` (B, H, L, D) at `begin`: the same memory where there is room in it."""
    if held is not None and held.dtype == mx.float32:
        stored = "f32"
    rows = _as_stored(new, stored)
    end = begin + new.shape[2]
    room = held.host if isinstance(held, Room) else None
    if not isinstance(held, Room) or room is None or not _fits(room, rows.dtype, end):
        held = _room(held, begin, new.shape, rows.dtype)
        room = held.host
    room[:, :, begin:end] = rows
    return held


def _fits(room: Host, dtype: Any, end: int) -> bool:
    return bool(room.dtype == dtype) and room.shape[2] >= end


def _as_stored(new: Host, stored: str) -> Host:
    """The rows as they are kept: float32 those that float16 cannot hold."""
    if stored == "f32":
        return new
    half = np.empty(new.shape, np.float16)
    return half if ops.encode(np.ascontiguousarray(new), "f16", half) else new


def _room(held: mx.array | None, begin: int, new: tuple[int, ...], dtype: Any) -> Room:
    """A cache with room for `new`.

    It is a quarter more than is needed, so that copying stays rare.
    """
    batch, heads, count, size = new
    tokens = (begin + count) * 5 // 4 // STEP * STEP + STEP
    made = Room(np.zeros((batch, heads, tokens, size), dtype))
    if held is not None:
        made.host[:, :, :begin] = evaluated(held[:, :, :begin])[0]
    return made

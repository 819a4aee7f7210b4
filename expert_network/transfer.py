"""Values on their way between NumPy and MLX, in both directions.

MLX on CUDA reads and makes host values in memory that both sides share page by page: each page then
travels by a fault, and the allocator gives such memory to later kernels too. In the token loop this
took 0.35 ms a layer (H200). There a kernel of ours copies between the device and pinned memory, and
the host watches that memory for the end, which is sooner than being woken: 0.06 ms.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import prod
from time import perf_counter
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from expert_network.model.host import evaluated

Host = NDArray[Any]

#: Seconds to watch pinned memory before sleeping: a layer's work for a few rows takes less.
WATCH_S = 0.002
#: Bytes that one block of threads copies: several could not say together that they are done.
WATCHED_BYTES = 64 << 10
#: Bytes of the longest call that goes through pinned memory, which is kept.
PINNED_BYTES = 64 << 20

_HEADER = 64  # bytes: a counter, then the size of each array
_ALIGNMENT = 16  # bytes, of each array: what a thread copies at a time
_THREADS, _BLOCKS = 512, 64
_PLANS = 64  # of one memory: the token loop needs a few, prompts one for each length

# What NumPy and MLX both know. A NumPy dtype's own name takes long to make.
_NUMPY: dict[mx.Dtype, np.dtype[Any]] = {
    getattr(mx, name): np.dtype(name)
    for name in ("float32", "float16", "int8", "int32", "uint8", "uint16", "uint32")
}
_MLX = {numpy: mlx for mlx, numpy in _NUMPY.items()}


class Transfer:
    """As MLX does it, which is right where its memory is the host's. For one caller at a time."""

    def fetch(self, *arrays: mx.array) -> tuple[Host, ...]:
        """The arrays' values, after one wait. View a bfloat16 as uint16 before: NumPy has none."""
        return evaluated(*arrays)

    def put(self, *values: Host) -> tuple[mx.array, ...]:
        """Arrays of these values, which may change afterwards."""
        return tuple(mx.array(value) for value in values)


class PinnedTransfer(Transfer):
    """On CUDA, through memory that the device reaches over the bus. Raises OSError without it."""

    def __init__(self) -> None:
        self._outbox, self._inbox = _Pinned(), _Pinned()
        # Who watches memory must see one write after the other, as x86 does.
        self._watches = platform.machine().lower() in ("x86_64", "amd64")
        #: What reads the inbox or has read it, where its counter is then, and whether it was long.
        self._reading: list[mx.array] = []
        self._filled, self._long = 0, False

    def fetch(self, *arrays: mx.array) -> tuple[Host, ...]:
        """See Transfer."""
        box = self._outbox
        plan = box.plan([(array.shape, array.dtype) for array in arrays])
        if plan is None:
            return super().fetch(*arrays)
        box.prepare(plan)
        before = int(box.header[0])
        done = _fetch_kernel(len(arrays))(
            inputs=[*arrays, box.address],
            output_shapes=[(16,)],
            output_dtypes=[mx.uint32],
            **plan.grid,
        )
        mx.async_eval(done)  # type: ignore[no-untyped-call]
        if plan.long or not self._watches or not _changes(box.header, before):
            mx.eval(done)
        return tuple(part.copy() for part in plan.parts)

    def put(self, *values: Host) -> tuple[mx.array, ...]:
        """See Transfer. Short values are read from their memory when the arrays are evaluated."""
        box = self._inbox
        if self._long or box.header[0] != self._filled:
            box = self._settled()
        plan = box.plan([(value.shape, _MLX[value.dtype]) for value in values])
        if plan is None:
            return super().put(*values)
        box.prepare(plan)
        for part, value in zip(plan.parts, values, strict=True):
            part[...] = value
        self._filled, self._long = int(box.header[0]) + 1, plan.long
        self._reading = _put_kernel(len(values))(
            inputs=[box.address],
            output_shapes=plan.shapes,
            output_dtypes=plan.dtypes,
            **plan.grid,
        )
        if plan.long:
            mx.async_eval(self._reading)  # type: ignore[no-untyped-call]
        return tuple(self._reading)

    def _settled(self) -> _Pinned:
        """An inbox that nothing has still to read."""
        try:
            mx.eval(self._reading)
        except RuntimeError:
            # Lazy arrays of another thread, which a failure kept from its work, keep their memory.
            self._inbox, self._filled = _Pinned(), 0
        self._reading, self._long = [], False
        return self._inbox


def transfer_for(backend: str) -> Transfer:
    """What moves values best on the backend of this name; see Backend."""
    if backend != "mlx-cuda":
        return Transfer()
    try:
        return PinnedTransfer()
    except OSError:
        return Transfer()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _changes(header: Host, before: int) -> bool:
    """Whether the counter changes soon. Looks and does nothing else: sleeping costs more."""
    until = perf_counter() + WATCH_S
    while header[0] == before:
        if perf_counter() > until:
            return False
    return True


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where arrays of certain shapes lie in pinned memory, and the launch that copies them.

    long: more than one block of threads copies, so that nobody can say when all is done.
    """

    shapes: list[tuple[int, ...]]
    dtypes: list[mx.Dtype]
    sizes: NDArray[np.uint32]
    parts: list[Host]
    long: bool
    grid: dict[str, tuple[int, int, int]]


class _Pinned:
    """Memory of the host that a CUDA device reads and writes in place."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._take(WATCHED_BYTES)

    def plan(self, arrays: Sequence[tuple[tuple[int, ...], mx.Dtype]]) -> _Plan | None:
        """The plan for arrays of these shapes; None if they are too long together.

        Nothing may use the memory meanwhile.
        """
        found = self._plans.get(key := tuple(arrays))
        if found is None:
            found = self._new_plan(key)
            if found is not None:
                if len(self._plans) >= _PLANS:
                    self._plans.clear()
                self._plans[key] = found
        return found

    def prepare(self, plan: _Plan) -> None:
        """Write the sizes down for a kernel."""
        self.header[1 : len(plan.sizes) + 1] = plan.sizes

    def _new_plan(self, arrays: Sequence[tuple[tuple[int, ...], mx.Dtype]]) -> _Plan | None:
        shapes, dtypes = [shape for shape, _ in arrays], [dtype for _, dtype in arrays]
        sizes = [prod(shape) * dtype.size for shape, dtype in arrays]
        starts = list(accumulate(map(_aligned, sizes), initial=_HEADER))
        length = starts[-1] - _HEADER
        if length > PINNED_BYTES:
            return None
        if length > len(self._memory) - _HEADER:
            self._driver.cuMemFreeHost(ctypes.c_void_p(self._memory.ctypes.data))
            self._take(1 << (length - 1).bit_length())
        parts = [
            self._memory[start : start + size].view(_NUMPY[dtype]).reshape(shape)
            for start, size, (shape, dtype) in zip(starts, sizes, arrays, strict=False)
        ]
        long = length > WATCHED_BYTES
        grid = {
            "grid": ((_BLOCKS if long else 1) * _THREADS, 1, 1),
            "threadgroup": (_THREADS, 1, 1),
        }
        return _Plan(shapes, dtypes, np.array(sizes, np.uint32), parts, long, grid)

    def _take(self, capacity: int) -> None:
        # The driver allocates for the context that MLX makes this thread's when it computes.
        mx.eval(mx.zeros((16,)))
        pointer, size = ctypes.c_void_p(), _HEADER + capacity
        flags = ctypes.c_uint(3)  # for every context, and mapped into the device's addresses
        refused = self._driver.cuMemHostAlloc(ctypes.byref(pointer), ctypes.c_size_t(size), flags)
        if refused or pointer.value is None:
            raise OSError(f"the CUDA driver gives no pinned memory (error {refused})")
        memory = (ctypes.c_uint8 * size).from_address(pointer.value)
        self._memory: Host = np.ctypeslib.as_array(memory)
        self.header: Host = self._memory[:_HEADER].view(np.uint32)
        self.header[:] = 0
        self._plans: dict[Any, _Plan] = {}
        self.address = mx.array(np.array([pointer.value], np.uint64))


# --- the kernels: sizes stand in the header, so that one of each serves every shape

_COPY = """
__device__ inline void copy_bytes(void* to, const void* from, unsigned size) {
  unsigned first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  bool aligned = (reinterpret_cast<size_t>(to) | reinterpret_cast<size_t>(from)) % 16 == 0;
  unsigned whole = aligned ? size / 16 : 0;
  for (unsigned i = first; i < whole; i += step)
    static_cast<uint4*>(to)[i] = static_cast<const uint4*>(from)[i];
  for (unsigned i = whole * 16 + first; i < size; i += step)
    static_cast<char*>(to)[i] = static_cast<const char*>(from)[i];
}
"""
_BEGIN = """
  unsigned* header = reinterpret_cast<unsigned*>(where[0]);
  char* place = reinterpret_cast<char*>(header) + 64;
"""
_FETCH = "  copy_bytes(place, a{0}, header[{0} + 1]); place += (header[{0} + 1] + 15) / 16 * 16;\n"
_PUT = "  copy_bytes(a{0}, place, header[{0} + 1]); place += (header[{0} + 1] + 15) / 16 * 16;\n"
_COUNT = """
  __threadfence_system();
  __syncthreads();
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    volatile unsigned* counter = header;
    *counter = *counter + 1;
  }
"""


def _names(count: int) -> list[str]:
    return [f"a{n}" for n in range(count)]


@cache
def _fetch_kernel(count: int) -> Any:
    return mx.fast.cuda_kernel(
        name=f"fetch_{count}",
        input_names=[*_names(count), "where"],
        output_names=["done"],
        source=_BEGIN + "".join(_FETCH.format(n) for n in range(count)) + _COUNT,
        header=_COPY,
    )


@cache
def _put_kernel(count: int) -> Any:
    return mx.fast.cuda_kernel(
        name=f"put_{count}",
        input_names=["where"],
        output_names=_names(count),
        source=_BEGIN + "".join(_PUT.format(n) for n in range(count)) + _COUNT,
        header=_COPY,
    )

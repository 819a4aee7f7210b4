"""Values on their way between NumPy and MLX, in both directions.

MLX on CUDA reads and makes host values in memory that both sides share page by page: each page then
travels by a fault, and the allocator gives such memory to later kernels too. In the token loop this
took 0.35 ms a layer (H200). There a kernel of ours copies between the device and pinned memory, and
the host watches that memory for the end, which is sooner than being woken: 0.06 ms.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import prod
from threading import local
from time import perf_counter
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from expert_network.model.host import evaluated

Host = NDArray[Any]
Shapes = tuple[tuple[tuple[int, ...], mx.Dtype], ...]

#: Seconds to watch pinned memory before sleeping: a layer's work for a few rows takes less.
WATCH_S = 0.002
#: Bytes that one block of threads copies: several could not say together that they are done.
WATCHED_BYTES = 64 << 10
#: Bytes of the longest call that goes through pinned memory, which is kept.
PINNED_BYTES = 64 << 20

_HEADER = 64  # bytes: a counter, then the size of each array
_MOST = 7  # arrays of one call, whose sizes a kernel knows
_ALIGNMENT = 16  # bytes, of each array: what a thread copies at a time
_THREADS, _BLOCKS = 512, 64
_PLANS = 64  # of one memory: the token loop needs a few, prompts one for each length

# What NumPy and MLX both know. A NumPy dtype's own name takes long to make.
_NUMPY: dict[mx.Dtype, np.dtype[Any]] = {
    getattr(mx, name): np.dtype(name)
    for name in ("float32", "float16", "int8", "int32", "uint8", "uint16", "uint32")
}
_MLX = {numpy: mlx for mlx, numpy in _NUMPY.items()}


class Fetch:
    """The values of arrays, once. Only one may be under way."""

    def __init__(self, arrays: Sequence[mx.array]) -> None:
        self._arrays = arrays

    def start(self) -> None:
        """Evaluate the arrays, if that can be done meanwhile."""

    def wait(self) -> tuple[Host, ...]:
        """The values. Starts what was not started."""
        return evaluated(*self._arrays)


class Transfer:
    """As MLX does it, which is right where its memory is the host's. For one caller at a time."""

    #: Whether there is `promise`.
    promises = False

    def fetch(self, *arrays: mx.array) -> tuple[Host, ...]:
        """The arrays' values, after one wait. View a bfloat16 as uint16 before: NumPy has none."""
        return self.fetching(*arrays).wait()

    def fetching(self, *arrays: mx.array) -> Fetch:
        """A fetch that has not begun, so that it can begin at once later on."""
        return Fetch(arrays)

    def put(self, *values: Host) -> tuple[mx.array, ...]:
        """Arrays of these values, which may change afterwards."""
        return tuple(mx.array(value) for value in values)

    def promise(self, shape: tuple[int, ...]) -> tuple[mx.array, NDArray[np.float32]]:
        """An array, and where its values are to be written before anything evaluates it.

        Nothing else may be put until then.
        """
        raise NotImplementedError

    def through(self, function: Callable[..., mx.array]) -> Callable[..., Host]:
        """`function` of arrays as one of their values, compiled: for calls of few shapes."""
        compiled = mx.compile(function)
        return lambda *values: self.fetch(compiled(*self.put(*values)))[0]


class PinnedTransfer(Transfer):
    """On CUDA, through memory that the device reaches over the bus. Raises OSError without it."""

    promises = True

    def __init__(self) -> None:
        self._outbox, self._inbox = _Pinned(), _Pinned()
        # Who watches memory must see one write after the other, as x86 does.
        self._watches = platform.machine().lower() in ("x86_64", "amd64")
        #: What reads the inbox or has read it, where its counter is then, and whether it was long.
        self._reading: list[mx.array] = []
        self._filled, self._long = 0, False

    def fetching(self, *arrays: mx.array) -> Fetch:
        """See Transfer."""
        box = self._outbox
        plan = box.plan(tuple((array.shape, array.dtype) for array in arrays))
        if plan is None:
            return super().fetching(*arrays)
        box.prepare(plan)
        return _PinnedFetch(_fetch(arrays, box.address, plan), box.header, plan, self._watches)

    def put(self, *values: Host) -> tuple[mx.array, ...]:
        """See Transfer. Short values are read from their memory when the arrays are evaluated."""
        plan = self._free().plan(_shapes(values))
        if plan is None:
            return super().put(*values)
        self._fill(plan, values)
        self._reading = _put(self._inbox.address, plan)
        if plan.long:
            mx.async_eval(self._reading)  # type: ignore[no-untyped-call]
        return tuple(self._reading)

    def promise(self, shape: tuple[int, ...]) -> tuple[mx.array, NDArray[np.float32]]:
        """See Transfer. For a few rows: ValueError if they are long."""
        plan = self._free().plan(((shape, mx.float32),))
        if plan is None or plan.long:
            raise ValueError(f"an array of shape {shape} is too long to be promised")
        self._fill(plan, ())
        self._reading = _put(self._inbox.address, plan)
        return self._reading[0], plan.parts[0]

    def through(self, function: Callable[..., mx.array]) -> Callable[..., Host]:
        """See Transfer. Between short values all is one call of MLX's."""
        compiled: dict[Shapes, _Through] = {}
        at_length = super().through(function)

        def call(*values: Host) -> Host:
            shapes = _shapes(values)
            known = compiled.get(shapes)
            if known is None:
                known = compiled[shapes] = _Through(function, shapes)
            box, to = self._free(), self._outbox
            asked, answered = box.plan(shapes), to.plan(known.answer)
            if asked is None or answered is None or asked.long or answered.long:
                return at_length(*values)
            done = known.launch(asked, answered, box.address, to.address)
            self._fill(asked, values)
            to.prepare(answered)
            self._reading = [done]
            fetch = _PinnedFetch(done, to.header, answered, self._watches)
            fetch.start()
            known.prepare(asked, answered, box.address, to.address)
            return fetch.wait()[0]

        return call

    def _fill(self, plan: _Plan, values: Sequence[Host]) -> None:
        """Write into the inbox, which must be free, what a launch by `plan` will read."""
        box = self._inbox
        box.prepare(plan)
        for part, value in zip(plan.parts, values, strict=False):
            part[...] = value
        self._filled, self._long = int(box.header[0]) + 1, plan.long

    def _free(self) -> _Pinned:
        """The inbox, with nothing in it that is still to be read."""
        if self._long or self._inbox.header[0] != self._filled:
            return self._settled()
        return self._inbox

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


def _shapes(values: Sequence[Host]) -> Shapes:
    return tuple((value.shape, _MLX[value.dtype]) for value in values)


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


class _Through:
    """A function from what stands in an inbox to what is written into an outbox.

    answer: the shape and dtype of that.
    """

    def __init__(self, function: Callable[..., mx.array], shapes: Shapes) -> None:
        self._function = function
        made = function(*(mx.zeros(shape, dtype) for shape, dtype in shapes))
        self.answer: Shapes = ((made.shape, made.dtype),)
        self._compiled: Any = None
        # A lazy array belongs to the thread that made it.
        self._ready = local()

    def launch(self, asked: _Plan, answered: _Plan, inbox: mx.array, outbox: mx.array) -> mx.array:
        """The launch, lazy. Plans for the same shapes differ in their memory alone."""
        made, self._ready.made = getattr(self._ready, "made", None), None
        if made is not None and made[0] is inbox and made[1] is outbox:
            launch: mx.array = made[2]
            return launch
        return self._make(asked, answered, inbox, outbox)

    def prepare(self, asked: _Plan, answered: _Plan, inbox: mx.array, outbox: mx.array) -> None:
        """Make the next launch now, when there is time: it is the same for all values."""
        self._ready.made = inbox, outbox, self._make(asked, answered, inbox, outbox)

    def _make(self, asked: _Plan, answered: _Plan, inbox: mx.array, outbox: mx.array) -> mx.array:
        if self._compiled is None:

            def run(inbox: mx.array, outbox: mx.array) -> mx.array:
                return _fetch([self._function(*_put(inbox, asked))], outbox, answered)

            self._compiled = mx.compile(run)
        made: mx.array = self._compiled(inbox, outbox)
        return made


class _PinnedFetch(Fetch):
    """What the launch `done` by `plan` writes into the outbox whose header this is."""

    def __init__(self, done: mx.array, header: Host, plan: _Plan, watches: bool) -> None:
        self._done, self._header, self._plan, self._watches = done, header, plan, watches
        self._before = -1  # until it has begun

    def start(self) -> None:
        """See Fetch."""
        self._before = int(self._header[0])
        mx.async_eval(self._done)  # type: ignore[no-untyped-call]

    def wait(self) -> tuple[Host, ...]:
        """See Fetch."""
        if self._before < 0:
            self.start()
        plan = self._plan
        if plan.long or not self._watches or not _changes(self._header, self._before):
            mx.eval(self._done)
        return tuple(part.copy() for part in plan.parts)


class _Pinned:
    """Memory of the host that a CUDA device reads and writes in place."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._take(WATCHED_BYTES)

    def plan(self, arrays: Shapes) -> _Plan | None:
        """The plan for arrays of these shapes; None if they are too long together.

        Nothing may use the memory meanwhile.
        """
        found = self._plans.get(arrays)
        if found is None:
            found = self._new_plan(arrays)
            if found is not None:
                if len(self._plans) >= _PLANS:
                    self._plans.clear()
                self._plans[arrays] = found
        return found

    def prepare(self, plan: _Plan) -> None:
        """Write the sizes down for a kernel."""
        self.header[1 : len(plan.sizes) + 1] = plan.sizes

    def _new_plan(self, arrays: Shapes) -> _Plan | None:
        shapes, dtypes = [shape for shape, _ in arrays], [dtype for _, dtype in arrays]
        sizes = [prod(shape) * dtype.size for shape, dtype in arrays]
        starts = list(accumulate(map(_aligned, sizes), initial=_HEADER))
        length = starts[-1] - _HEADER
        if length > PINNED_BYTES or len(arrays) > _MOST:
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

# Reading over the bus takes more than a microsecond, so that the header is read at once, and other
# threads copy short arrays than the one before.
_COPY = """
__device__ inline void copy_bytes(void* to, const void* from, unsigned size, unsigned before) {
  unsigned step = gridDim.x * blockDim.x, at = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned first = (at + step - before / 16 % step) % step;
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
  uint4 words[2] = {reinterpret_cast<uint4*>(header)[0], reinterpret_cast<uint4*>(header)[1]};
  const unsigned* known = reinterpret_cast<const unsigned*>(words);
  unsigned done_of = 0, size = 0;
"""
_NEXT = "  size = known[{0} + 1]; {1} done_of += (size + 15) / 16 * 16;\n"
_FETCH = _NEXT.format("{0}", "copy_bytes(place + done_of, a{0}, size, done_of);")
_PUT = _NEXT.format("{0}", "copy_bytes(a{0}, place + done_of, size, done_of);")
_COUNT = """
  __threadfence_system();
  __syncthreads();
  if (blockIdx.x == 0 && threadIdx.x == 0)
    *static_cast<volatile unsigned*>(header) = known[0] + 1;
"""


def _fetch(arrays: Sequence[mx.array], address: mx.array, plan: _Plan) -> mx.array:
    """The launch of a kernel that copies the arrays to where `address` says."""
    (done,) = _fetch_kernel(len(arrays))(
        inputs=[*arrays, address], output_shapes=[(16,)], output_dtypes=[mx.uint32], **plan.grid
    )
    made: mx.array = done
    return made


def _put(address: mx.array, plan: _Plan) -> list[mx.array]:
    """Arrays that a kernel copies from where `address` says."""
    made: list[mx.array] = _put_kernel(len(plan.shapes))(
        inputs=[address], output_shapes=plan.shapes, output_dtypes=plan.dtypes, **plan.grid
    )
    return made


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

"""One MoE layer's resident experts, computed by the family's own switch module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from numpy.typing import NDArray

from expert_network.errors import NotOwned, StoreCorrupt
from expert_network.store.manifest import LayerSpec, TensorSpec

# Bytes of activations in one call of a switch module: longer dispatches are computed in parts.
CALL_BYTES = 32 << 20

# Fills writable pieces, block_bytes in all, with the block of one expert.
ReadBlock = Callable[[int, Sequence[memoryview]], None]

# x (N, D) and slots (N, k) to (N, k, D).
Run = Callable[[mx.array, mx.array], mx.array]

_ABSENT = 0xFFFFFFFF


class ResidentLayer:
    """The experts `ids` (ascending, at least one) of one layer, at slots 0, 1, 2...

    `switch` is the layer's module of a lazy model. It is taken over: what `read` gives takes the
    place of its expert tensors, as stacks (slots, ...). `in_place` says that the CPU may write to
    MLX's memory; blocks are then read straight into it. Evaluates all on the calling thread.
    """

    def __init__(
        self,
        spec: LayerSpec,
        switch: Module,
        ids: NDArray[np.intp],
        read: ReadBlock,
        in_place: bool,
    ) -> None:
        self.spec, self.switch, self.ids = spec, switch, ids
        self.nbytes = len(ids) * spec.block_bytes
        self.most_pairs = max(64, CALL_BYTES // pair_bytes(spec))
        self._slots = np.full(spec.experts, _ABSENT, np.uint32)
        self._slots[ids] = np.arange(len(ids), dtype=np.uint32)
        stacks = [_Stack(tensor, len(ids), in_place) for tensor in spec.tensors]
        self._read(read, stacks)
        self._bytes = {stack.spec: stack.finish(switch) for stack in stacks}

    def slots(self, ids: NDArray[Any]) -> NDArray[np.uint32]:
        """The slots of experts, of `ids`' shape. Raises NotOwned if one is not resident."""
        if int(ids.max()) < self.spec.experts:
            slots: NDArray[np.uint32] = self._slots[ids]
            if int(slots.max()) != _ABSENT:
                return slots
        held = set(self.ids.tolist())
        raise NotOwned(self.spec.layer, next(i for i in ids.ravel().tolist() if i not in held))

    def outputs(self, x: mx.array, ids: mx.array, run: Run | None = None) -> mx.array:
        """x (N, D) and experts `ids` (N, k) to (N, k, D), by `run` or as `run` does.

        Lazy, unless experts of the layer are missing or its weights are cast at each call. Raises
        NotOwned.
        """
        if len(self.ids) < self.spec.experts:
            ids = mx.array(self.slots(np.asarray(ids)))
        return self.in_parts(x, ids, run or self.run)

    def in_parts(self, x: mx.array, slots: mx.array, run: Run) -> mx.array:
        """x (N, D) and slots (N, k) to (N, k, D): `run` is called with most_pairs at most."""
        step = max(1, self.most_pairs // slots.shape[1])
        if len(x) <= step:
            return run(x, slots)
        starts = range(0, len(x), step)
        return mx.concatenate([run(x[n : n + step], slots[n : n + step]) for n in starts])

    def run(self, x: mx.array, slots: mx.array) -> mx.array:
        """x (N, D) and slots (N, k), at most most_pairs of them, to (N, k, D)."""
        return cast(mx.array, self.switch(x, slots))

    def block_bytes(self, expert: int) -> memoryview:
        """The block as the store has it, from memory. Any thread. Raises NotOwned."""
        slot = int(self.slots(np.array([expert]))[0])
        block = np.zeros(self.spec.block_bytes, np.uint8)
        for tensor, stack in self._bytes.items():
            block[tensor.offset : tensor.offset + tensor.nbytes] = np.asarray(stack[slot])
        return block.data

    def _read(self, read: ReadBlock, stacks: list[_Stack]) -> None:
        gaps = memoryview(bytearray(self.spec.block_bytes))
        for slot, expert in enumerate(self.ids.tolist()):
            pieces, between, end = [], [], 0
            for stack in sorted(stacks, key=lambda stack: stack.spec.offset):
                between.append(gaps[end : stack.spec.offset])
                pieces += [between[-1], stack.room(slot)]
                end = stack.spec.offset + stack.spec.nbytes
            between.append(gaps[end:])
            read(expert, [*pieces, between[-1]])
            if any(any(gap) for gap in between):
                what = f"block ({self.spec.layer}, {expert}) has bytes that belong to no tensor"
                raise StoreCorrupt(self.spec.file, what, "convert the checkpoint again")


class _Stack:
    """One tensor of all resident experts, while blocks are read."""

    def __init__(self, spec: TensorSpec, slots: int, in_place: bool) -> None:
        self.spec = spec
        self._memory: mx.array | None = None
        if in_place:
            self._memory = mx.zeros((slots, spec.nbytes), mx.uint8)
            mx.eval(self._memory)
            self._host = np.asarray(self._memory)
        else:
            self._host = np.empty((slots, spec.nbytes), np.uint8)

    def room(self, slot: int) -> memoryview:
        """Where the bytes of one expert go."""
        return memoryview(self._host[slot])

    def finish(self, switch: Module) -> mx.array:
        """Put the stack into the switch module; its bytes, uint8 (slots, nbytes)."""
        memory = mx.array(self._host) if self._memory is None else self._memory
        del self._host
        stack = memory.view(getattr(mx, self.spec.dtype))
        stack = stack.reshape(len(memory), *self.spec.shape)
        mx.eval(memory, stack)
        *path, name = self.spec.name.split(".")
        module: Any = switch
        for part in path:
            module = module[part]
        module[name] = stack
        return memory


def pair_bytes(spec: LayerSpec) -> int:
    """About what one row takes on its way through one expert, in float32."""
    widest = max((tensor.shape[0] for tensor in spec.tensors if tensor.shape), default=1)
    return 4 * 3 * (spec.hidden + widest)

"""One MoE layer's experts as a partition asks them, and how MLX answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from expert_network.experts.mlx_backend import ResidentLayer
from expert_network.store.manifest import LayerSpec

Counts = NDArray[np.unsignedinteger]

# What is asked for, by the wire's numbers: the protocol is out of this package's reach.
SUM, EXACT = 0, 1


class Layer(Protocol):
    """The experts of one layer that are held: `ids` ascending, `nbytes` in memory.

    `precise` asks for activations in the compute dtype; without it a kernel may round them. Every
    method raises NotOwned for an expert that is not held.
    """

    @property
    def spec(self) -> LayerSpec: ...
    @property
    def ids(self) -> NDArray[np.intp]: ...
    @property
    def nbytes(self) -> int: ...

    def outputs(self, x: mx.array, ids: mx.array, precise: bool) -> mx.array:
        """x (N, D) and ids (N, k) to each expert's own output, (N, k, D) in x's dtype."""

    def weighted_sum(
        self, x: mx.array, ids: mx.array, weights: mx.array, precise: bool
    ) -> mx.array:
        """The sum over k of weights (N, k) times outputs: (N, D) in float32."""

    def compute(
        self,
        mode: int,
        rows: NDArray[np.float32],
        offsets: NDArray[np.unsignedinteger],
        ids: NDArray[np.unsignedinteger],
        weights: NDArray[np.float32],
        precise: bool,
    ) -> NDArray[np.float32]:
        """Answer a dispatch; see Partition.compute."""

    def block_bytes(self, expert: int) -> memoryview:
        """The block as the store has it, from memory. Any thread."""


class MlxLayer:
    """A layer computed by the family's own switch module, in `dtype` whether precise or not."""

    def __init__(self, resident: ResidentLayer, dtype: mx.Dtype) -> None:
        self._resident, self._dtype = resident, dtype
        self.spec, self.ids, self.nbytes = resident.spec, resident.ids, resident.nbytes
        self.block_bytes = resident.block_bytes

    def outputs(self, x: mx.array, ids: mx.array, precise: bool) -> mx.array:
        """See Layer. Lazy, unless experts are missing or weights are cast at each call."""
        return self._resident.outputs(x.astype(self._dtype), ids).astype(x.dtype)

    def weighted_sum(
        self, x: mx.array, ids: mx.array, weights: mx.array, precise: bool
    ) -> mx.array:
        """See Layer; lazy where outputs is."""
        outputs = self._resident.outputs(x.astype(self._dtype), ids).astype(mx.float32)
        return (outputs * weights.astype(mx.float32)[..., None]).sum(axis=-2)

    def compute(
        self,
        mode: int,
        rows: NDArray[np.float32],
        offsets: NDArray[np.unsignedinteger],
        ids: NDArray[np.unsignedinteger],
        weights: NDArray[np.float32],
        precise: bool,
    ) -> NDArray[np.float32]:
        """See Layer. Long dispatches are computed in parts."""
        slots = self._resident.slots(ids)
        x = mx.array(rows).astype(self._dtype)
        parts = []
        for first, last in _parts(offsets, self._resident.most_pairs):
            pairs = slice(int(offsets[first]), int(offsets[last]))
            counts = offsets[first + 1 : last + 1] - offsets[first:last]
            values = _pairs(self._resident, x[first:last], counts, slots[pairs])
            parts.append(values if mode == EXACT else add_up(values, counts, weights[pairs]))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _parts(offsets: NDArray[np.unsignedinteger], most: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows with at most `most` pairs, or one row, each."""
    rows, first = len(offsets) - 1, 0
    if int(offsets[-1]) <= most:
        yield 0, rows
        return
    while first < rows:
        end = int(np.searchsorted(offsets, int(offsets[first]) + most, "right")) - 1
        last = max(end, first + 1)
        yield first, last
        first = last


def same(counts: Counts) -> int:
    """The number of pairs that all rows have, 0 if it is not the same."""
    each = int(counts[0])
    return each if len(counts) == 1 or (counts == each).all() else 0


def _pairs(
    resident: ResidentLayer, x: mx.array, counts: Counts, slots: NDArray[np.uint32]
) -> NDArray[np.float32]:
    """The output of each pair, (P, D); row r of `x` has the next counts[r] of `slots`."""
    each = same(counts)
    if not each:
        x, each = x[mx.array(np.repeat(np.arange(len(counts)), counts))], 1
    y = resident.run(x, mx.array(slots.reshape(-1, each))).astype(mx.float32)
    return np.asarray(y).reshape(len(slots), -1)


def add_up(
    values: NDArray[np.float32], counts: Counts, weights: NDArray[np.float32]
) -> NDArray[np.float32]:
    """The weighted sum of each row's values, added one after the other: (R, D)."""
    weighted: NDArray[np.float32] = values * weights[:, None]
    if each := same(counts):
        # Along an axis that is not the last one NumPy adds in order.
        in_order: NDArray[np.float32] = weighted.reshape(len(counts), each, -1).sum(axis=1)
        return in_order
    starts = np.cumsum(counts, dtype=np.intp) - counts
    sums: NDArray[np.float32] = weighted[starts]
    for n in range(1, int(counts.max())):
        some = counts > n
        sums[some] += weighted[starts[some] + n]
    return sums

"""A partition in memory: loaded from a store, verified, and asked for what its experts make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from expert_network.backend import Backend
from expert_network.errors import NotOwned
from expert_network.experts import upcast
from expert_network.experts.mlx_backend import ResidentLayer
from expert_network.model import structure
from expert_network.model.seam import find_switches
from expert_network.progress import Progress, silent
from expert_network.store.manifest import LayerSpec, Manifest
from expert_network.store.reader import Store

# The experts of each layer, ascending. Layers without any may be left out.
Blocks = Mapping[int, NDArray[np.intp]]

Counts = NDArray[np.unsignedinteger]

# What is asked for, by the wire's numbers: the protocol is out of this package's reach.
SUM, EXACT = 0, 1


def partition_bytes(manifest: Manifest, blocks: Blocks) -> int:
    """Bytes that the blocks take in memory."""
    return sum(len(ids) * manifest.layer(layer).block_bytes for layer, ids in blocks.items())


def load_partition(
    store: Store, blocks: Blocks, backend: Backend, progress: Progress = silent
) -> Partition:
    """Read blocks into memory and verify each; nothing is read of the others.

    Takes the partition's bytes and little besides (on "mlx-cuda": one more tensor of one layer).
    Any thread may use the result. Raises StoreCorrupt, StoreError, KeyError for an unknown layer.
    """
    manifest = store.manifest
    wanted = [(manifest.layer(layer), np.asarray(ids)) for layer, ids in blocks.items() if len(ids)]
    switches = {site.path: site.module for site in find_switches(structure.build(store))}
    total, done = partition_bytes(manifest, blocks), 0

    def read(spec: LayerSpec, expert: int, pieces: Any) -> None:
        nonlocal done
        store.read_block_into(spec.layer, expert, pieces)
        done += spec.block_bytes
        progress(done, total, "loading")

    in_place = backend.name != "mlx-cuda"
    layers = {
        spec.layer: ResidentLayer(spec, switches[spec.path], ids, partial(read, spec), in_place)
        for spec, ids in wanted
    }
    if backend.name == "mlx-cpu":
        upcast.adapt([layer.switch for layer in layers.values()])
    return Partition(layers, backend, manifest.dtype)


class Partition:
    """The blocks that a process holds. Made by load_partition.

    Implements Experts for a model in the same process, and `compute` for a node. One caller at a
    time. `compute_dtype` is that of activations, `numerics` the id that promises identical bits.
    """

    def __init__(self, layers: Mapping[int, ResidentLayer], backend: Backend, stored: str) -> None:
        self._layers = layers
        self.compute_dtype = backend.compute_dtype(stored)
        self.numerics = backend.numerics(self.compute_dtype)
        self._dtype: mx.Dtype = getattr(mx, self.compute_dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks held."""
        return sum(layer.nbytes for layer in self._layers.values())

    @property
    def blocks(self) -> int:
        """How many blocks are held."""
        return sum(len(layer.ids) for layer in self._layers.values())

    def owned(self, layer: int) -> NDArray[np.intp]:
        """The experts of `layer` that are held, ascending."""
        held = self._layers.get(layer)
        return np.empty(0, np.intp) if held is None else held.ids

    def holds(self, layer: int, expert: int) -> bool:
        """Whether one block is held."""
        return expert in self.owned(layer)

    def block_bytes(self, layer: int, expert: int) -> bytes:
        """One block's bytes as the store has them, from memory. Raises NotOwned."""
        return self._layer(layer, expert).block_bytes(expert)

    def outputs(self, layer: int, x: mx.array, ids: mx.array) -> mx.array:
        """x (N, D) and ids (N, k) to each expert's own output, (N, k, D) in x's dtype.

        Raises NotOwned. Lazy where all experts of the layer are held and none is cast at each call.
        """
        return self._outputs(layer, x, ids).astype(x.dtype)

    def weighted_sum(self, layer: int, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        """The sum over k of weights (N, k) times outputs: (N, D) in float32. See outputs."""
        outputs = self._outputs(layer, x, ids).astype(mx.float32)
        return (outputs * weights.astype(mx.float32)[..., None]).sum(axis=-2)

    def compute(
        self,
        layer: int,
        mode: int,
        rows: NDArray[np.float32] | mx.array,
        offsets: NDArray[np.unsignedinteger],
        ids: NDArray[np.unsignedinteger],
        weights: NDArray[np.float32],
    ) -> NDArray[np.float32]:
        """Answer a dispatch of R rows and P pairs; row r has the pairs offsets[r] to offsets[r+1].

        rows (R, D), offsets (R+1), ids and weights (P). In mode SUM the weighted sum of each row's
        outputs, added in float32 in the order of its pairs: (R, D). In mode EXACT the outputs in
        the order of pairs, (P, D), values of the compute dtype. Raises NotOwned.
        """
        resident = self._layer(layer, int(ids[0]))
        slots = resident.slots(ids)
        x = mx.array(rows).astype(self._dtype)
        parts = []
        for first, last in _parts(offsets, resident.most_pairs):
            pairs = slice(int(offsets[first]), int(offsets[last]))
            counts = offsets[first + 1 : last + 1] - offsets[first:last]
            values = _pairs(resident, x[first:last], counts, slots[pairs])
            parts.append(values if mode == EXACT else _add_up(values, counts, weights[pairs]))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _outputs(self, layer: int, x: mx.array, ids: mx.array) -> mx.array:
        resident = self._layers.get(layer)
        if resident is None:
            raise NotOwned(layer, int(np.asarray(ids).flat[0]))
        return resident.outputs(x.astype(self._dtype), ids)

    def _layer(self, layer: int, expert: int) -> ResidentLayer:
        resident = self._layers.get(layer)
        if resident is None:
            raise NotOwned(layer, expert)
        return resident


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


def _same(counts: Counts) -> int:
    """The number of pairs that all rows have, 0 if it is not the same."""
    each = int(counts[0])
    return each if len(counts) == 1 or (counts == each).all() else 0


def _pairs(
    resident: ResidentLayer, x: mx.array, counts: Counts, slots: NDArray[np.uint32]
) -> NDArray[np.float32]:
    """The output of each pair, (P, D); row r of `x` has the next counts[r] of `slots`."""
    each = _same(counts)
    if not each:
        x, each = x[mx.array(np.repeat(np.arange(len(counts)), counts))], 1
    y = resident.run(x, mx.array(slots.reshape(-1, each))).astype(mx.float32)
    return np.asarray(y).reshape(len(slots), -1)


def _add_up(
    values: NDArray[np.float32], counts: Counts, weights: NDArray[np.float32]
) -> NDArray[np.float32]:
    """The weighted sum of each row's values, added one after the other: (R, D)."""
    weighted: NDArray[np.float32] = values * weights[:, None]
    if each := _same(counts):
        # Along an axis that is not the last one NumPy adds in order.
        in_order: NDArray[np.float32] = weighted.reshape(len(counts), each, -1).sum(axis=1)
        return in_order
    starts = np.cumsum(counts, dtype=np.intp) - counts
    sums: NDArray[np.float32] = weighted[starts]
    for n in range(1, int(counts.max())):
        some = counts > n
        sums[some] += weighted[starts[some] + n]
    return sums

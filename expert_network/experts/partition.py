"""A partition in memory: loaded from a store, verified, and asked for what its experts make."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from numpy.typing import NDArray

from expert_network import kernels
from expert_network.backend import Backend
from expert_network.errors import NotOwned
from expert_network.experts import upcast
from expert_network.experts.device_backend import DeviceLayer
from expert_network.experts.layers import EXACT, SUM, Layer, MlxLayer, add_up
from expert_network.experts.mlx_backend import ReadBlock, ResidentLayer
from expert_network.experts.native_backend import NativeLayer
from expert_network.model import structure
from expert_network.model.seam import find_switches
from expert_network.progress import Progress, silent
from expert_network.store.manifest import LayerSpec, Manifest
from expert_network.store.reader import Store
from expert_network.transfer import transfer_for

__all__ = ["EXACT", "SUM", "Blocks", "Partition", "load_partition", "partition_bytes"]

# The experts of each layer, ascending. Layers without any may be left out.
Blocks = Mapping[int, NDArray[np.intp]]

# The bytes of one.
Block = bytes | memoryview

# Some experts of a layer, ascending and at least one, in memory, from what reads blocks.
Make = Callable[[LayerSpec, NDArray[np.intp], ReadBlock], ResidentLayer]

#: Of one layer, until blocks that were taken one by one are put together: each costs a call.
MOST_PARTS = 8


def partition_bytes(manifest: Manifest, blocks: Blocks) -> int:
    """Bytes that the blocks take in memory."""
    return sum(len(ids) * manifest.layer(layer).block_bytes for layer, ids in blocks.items())


def load_partition(
    store: Store,
    blocks: Blocks,
    backend: Backend,
    progress: Progress = silent,
    precise: bool = True,
) -> Partition:
    """Read blocks into memory and verify each; nothing is read of the others.

    `precise` is how the partition computes for a model in this process; a dispatch says it itself.
    Takes the partition's bytes and little besides (on "mlx-cuda": one more tensor of one layer).
    Any thread may use the result. Raises StoreCorrupt, StoreError, KeyError for an unknown layer.
    """
    manifest = store.manifest
    wanted = [(manifest.layer(layer), np.asarray(ids)) for layer, ids in blocks.items() if len(ids)]
    model = structure.build(store, trunk=False)
    switches = {site.path: site.module for site in find_switches(model)}
    total, done = partition_bytes(manifest, blocks), 0

    def read(spec: LayerSpec, expert: int, pieces: Any) -> None:
        nonlocal done
        store.read_block_into(spec.layer, expert, pieces)
        done += spec.block_bytes
        progress(done, total, "loading")

    def make(spec: LayerSpec, ids: NDArray[np.intp], read: ReadBlock) -> ResidentLayer:
        # It takes its module over, and others may follow for the same layer.
        return ResidentLayer(spec, _copied(switches[spec.path]), ids, read, in_place)

    in_place = backend.name != "mlx-cuda"
    layers = [make(spec, ids, partial(read, spec)) for spec, ids in wanted]
    computing = _computing(layers, backend, manifest.dtype)
    return Partition(computing, backend, manifest.dtype, precise, make)


def _computing(layers: Sequence[ResidentLayer], backend: Backend, stored: str) -> list[Layer]:
    """Each layer with the kernels that compute it: native ones where they can, else MLX's."""
    native = [NativeLayer.over(layer) if backend.native else None for layer in layers]
    left = [layer for layer, other in zip(layers, native, strict=True) if other is None]
    if backend.name == "mlx-cpu":
        upcast.adapt([layer.switch for layer in left])
    dtype = getattr(mx, backend.compute_dtype(stored))
    mlx: Iterator[Layer] = iter(_mlx_layers(left, backend, dtype))
    return [next(mlx) if layer is None else layer for layer in native]


def _mlx_layers(
    layers: Sequence[ResidentLayer], backend: Backend, dtype: mx.Dtype
) -> Sequence[MlxLayer]:
    if backend.name == "mlx-cpu":
        return [MlxLayer(layer, dtype) for layer in layers]
    transfer, wide = transfer_for(backend.name), backend.name == "mlx-cuda"
    return [DeviceLayer(layer, dtype, transfer, wide) for layer in layers]


def _copied(module: Module) -> Module:
    """A module like `module`, with the same arrays."""
    made = copy(module)
    for name, child in module.items():
        if isinstance(child, Module):
            made[name] = _copied(child)
    return made


class Partition:
    """The blocks that a process holds. Made by load_partition.

    Implements Experts for a model in the same process, and `compute` for a node, which may also
    `hold` more blocks, or `put` what was `fitted`. One caller at a time. `compute_dtype` is that of
    activations, `numerics` the id that promises identical bits.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        backend: Backend,
        stored: str,
        precise: bool = True,
        make: Make | None = None,
    ) -> None:
        #: By layer what it was loaded as, and what was taken since.
        self._parts: dict[int, tuple[Layer, ...]] = {layer.spec.layer: (layer,) for layer in layers}
        #: By layer what native code was given, which stays the same object.
        self._natives: dict[int, object] = {}
        self._make = make
        self._precise, self._backend, self._stored = precise, backend, stored
        self.compute_dtype = backend.compute_dtype(stored)
        self.numerics = backend.numerics(self.compute_dtype)

    @property
    def kernels(self) -> str:
        """What computes, for a person: "native avx2, int8 (f32 when asked)" or "mlx-cpu"."""
        if not self._backend.native:
            return self._backend.name
        mlx = sorted({part.spec.layer for part in self._all() if isinstance(part, MlxLayer)})
        layers = f"; layers {', '.join(map(str, mlx))} {self._backend.name}" if mlx else ""
        return f"native {self._backend.isa}, int8 (f32 when asked){layers}"

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks held."""
        return sum(part.nbytes for part in self._all())

    @property
    def blocks(self) -> int:
        """How many blocks are held."""
        return sum(len(part.ids) for part in self._all())

    def owned(self, layer: int) -> NDArray[np.intp]:
        """The experts of `layer` that are held, ascending."""
        parts = self._parts.get(layer, ())
        if len(parts) == 1:
            return parts[0].ids
        return np.sort(np.concatenate([np.empty(0, np.intp), *(part.ids for part in parts)]))

    def holds(self, layer: int, expert: int) -> bool:
        """Whether one block is held."""
        return any(expert in part.ids for part in self._parts.get(layer, ()))

    def block_bytes(self, layer: int, expert: int) -> memoryview:
        """One block's bytes as the store has them, from memory. Raises NotOwned."""
        for part in self._parts.get(layer, ()):
            if expert in part.ids:
                return part.block_bytes(expert)
        raise NotOwned(layer, expert)

    def hold(self, spec: LayerSpec, blocks: Mapping[int, Block]) -> None:
        """Take blocks of one layer, by expert, that are verified and not held yet.

        Evaluates on the calling thread.
        """
        ids = np.array(sorted(blocks), np.intp)
        made = self._made(spec, ids, lambda expert, pieces: _scatter(blocks[expert], pieces))
        self._parts[spec.layer] = (*self._parts.get(spec.layer, ()), made)
        if len(self._parts[spec.layer]) > MOST_PARTS:
            self.put(spec, self.fitted(spec, self.owned(spec.layer)))

    def fitted(
        self,
        spec: LayerSpec,
        experts: NDArray[np.intp],
        more: Callable[[int], Block] | None = None,
    ) -> Layer | None:
        """A layer of just these experts in one part, for `put`; None without any.

        Those that are held are copied, `more` gives the others, verified. Takes the layer's bytes
        once more and changes nothing yet: any thread may do it, and evaluates.
        """

        def read(expert: int, pieces: Sequence[memoryview]) -> None:
            if more is None or self.holds(spec.layer, expert):
                block: Block = self.block_bytes(spec.layer, expert)
            else:
                block = more(expert)
            _scatter(block, pieces)

        return self._made(spec, np.sort(experts), read) if len(experts) else None

    def put(self, spec: LayerSpec, made: Layer | None) -> None:
        """Hold of a layer what `fitted` has made, and nothing else.

        Native code that was given the layer goes on with the new experts, so that nothing keeps the
        old ones in memory.
        """
        layer = spec.layer
        given = self._given(layer)
        if made is None:
            self._parts.pop(layer, None)
        else:
            self._parts[layer] = (made,)
        if given is not None:
            now: Any = made
            kernels.swap_experts(given, now.native if made else kernels.no_experts(spec.hidden))
            if made:
                now.native = given  # the other one has the old experts
        mx.clear_cache()  # what was let go is for others

    def scattered(self, layer: int) -> bool:
        """Whether a layer's blocks are in several parts, which cost a call each."""
        return len(self._parts.get(layer, ())) > 1

    def outputs(self, layer: int, x: mx.array, ids: mx.array) -> mx.array:
        """x (N, D) and ids (N, k) to each expert's own output, (N, k, D) in x's dtype.

        Raises NotOwned. With MLX's kernels it is lazy where all experts of the layer are held and
        none is cast at each call.
        """
        return self._asked(layer, ids).outputs(x, ids, self._precise)

    def weighted_sum(self, layer: int, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        """The sum over k of weights (N, k) times outputs: (N, D) in float32. See outputs."""
        return self._asked(layer, ids).weighted_sum(x, ids, weights, self._precise)

    def compute(
        self,
        layer: int,
        mode: int,
        rows: NDArray[np.float32],
        offsets: NDArray[np.unsignedinteger],
        ids: NDArray[np.unsignedinteger],
        weights: NDArray[np.float32],
        precise: bool = True,
    ) -> NDArray[np.float32]:
        """Answer a dispatch of R rows and P pairs; row r has the pairs offsets[r] to offsets[r+1].

        rows (R, D), offsets (R+1), ids and weights (P). In mode SUM the weighted sum of each row's
        outputs, added in float32 in the order of its pairs: (R, D). In mode EXACT the outputs in
        the order of pairs, (P, D), values of the compute dtype, and always precise. Raises
        NotOwned.
        """
        parts, precise = self._parts.get(layer, ()), precise or mode == EXACT
        if not parts:
            raise NotOwned(layer, int(ids[0]))
        if len(parts) == 1:
            return parts[0].compute(mode, rows, offsets, ids, weights, precise)
        values = _each(parts, rows, offsets, ids, weights, precise)
        return values if mode == EXACT else add_up(values, offsets[1:] - offsets[:-1], weights)

    def native(self, layer: int) -> object:
        """What native code computes a row of `layer` with, as `compute` would; None if nothing."""
        parts = self._parts.get(layer, ())
        return self._given(layer) if len(parts) == 1 else None

    def _given(self, layer: int) -> object:
        """What native code is given for a layer, whatever becomes of it."""
        given = self._natives.get(layer)
        if given is None and layer in self._parts:
            given = getattr(self._parts[layer][0], "native", None)
            self._natives[layer] = given
        return given

    def _made(self, spec: LayerSpec, ids: NDArray[np.intp], read: ReadBlock) -> Layer:
        assert self._make is not None
        return _computing([self._make(spec, ids, read)], self._backend, self._stored)[0]

    def _all(self) -> list[Layer]:
        return [part for parts in list(self._parts.values()) for part in parts]

    def _asked(self, layer: int, ids: mx.array) -> Layer:
        """What holds a layer of a model in this process."""
        parts = self._parts.get(layer)
        if parts is None:
            raise NotOwned(layer, int(np.asarray(ids).flat[0]))
        return parts[0]


def _scatter(block: Block, pieces: Sequence[memoryview]) -> None:
    """Copy a block into pieces that are as long as it together."""
    view, start = memoryview(block).cast("B"), 0
    for piece in pieces:
        piece[:] = view[start : start + len(piece)]
        start += len(piece)


def _each(
    parts: Sequence[Layer],
    rows: NDArray[np.float32],
    offsets: NDArray[np.unsignedinteger],
    ids: NDArray[np.unsignedinteger],
    weights: NDArray[np.float32],
    precise: bool,
) -> NDArray[np.float32]:
    """The output of each pair, (P, D), each from the part that holds its expert."""
    made = np.empty((len(ids), rows.shape[1]), np.float32)
    row_of_pair = np.repeat(np.arange(len(rows)), np.diff(offsets))
    left = np.ones(len(ids), np.bool_)
    for part in parts:
        pairs = np.flatnonzero(np.isin(ids, part.ids))
        if len(pairs):
            some, counts = np.unique(row_of_pair[pairs], return_counts=True)
            own = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32)
            asked = rows[some], own, ids[pairs], weights[pairs]
            made[pairs], left[pairs] = part.compute(EXACT, *asked, precise), False
    if left.any():
        raise NotOwned(parts[0].spec.layer, int(ids[left][0]))
    return made

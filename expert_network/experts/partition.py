"""A partition in memory: loaded from a store, verified, and asked for what its experts make."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from numpy.typing import NDArray

from expert_network import kernels
from expert_network.backend import Backend
from expert_network.errors import NotOwned
from expert_network.experts import upcast
from expert_network.experts.device_backend import DeviceLayer
from expert_network.experts.layers import EXACT, SUM, Layer, MlxLayer
from expert_network.experts.mlx_backend import ReadBlock, ResidentLayer
from expert_network.experts.native_backend import NativeLayer
from expert_network.model import structure
from expert_network.model.seam import find_switches
from expert_network.progress import Progress, silent
from expert_network.store.manifest import LayerSpec, Manifest
from expert_network.store.reader import Store
from expert_network.transfer import transfer_for

__all__ = ["EXACT", "SUM", "Blocks", "Partition", "load_partition", "partition_bytes"]

Ids = NDArray[np.intp]
Buffer = bytes | memoryview

# The experts of each layer, ascending. Layers without any may be left out.
Blocks = Mapping[int, Ids]


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
    manifest, loader = store.manifest, Loader(store, backend)
    wanted = [(manifest.layer(layer), np.asarray(ids)) for layer, ids in blocks.items() if len(ids)]
    total, done = partition_bytes(manifest, blocks), 0

    def read(spec: LayerSpec, expert: int, pieces: Sequence[memoryview]) -> None:
        nonlocal done
        store.read_block_into(spec.layer, expert, pieces)
        done += spec.block_bytes
        progress(done, total, "loading")

    layers = loader.layers([(spec, ids, partial(read, spec)) for spec, ids in wanted])
    return Partition(layers, loader, precise)


class Loader:
    """Makes the layers of one store for one backend: native ones where they can, else MLX's."""

    def __init__(self, store: Store, backend: Backend) -> None:
        self.manifest, self.backend = store.manifest, backend
        self._switches = {site.path: site.module for site in find_switches(structure.build(store))}

    def layers(self, wanted: Sequence[tuple[LayerSpec, Ids, ReadBlock]]) -> list[Layer]:
        """A layer for each spec, with these experts, ascending; `read` gives their blocks."""
        in_place = self.backend.name != "mlx-cuda"
        resident = [
            # Its own module each time: another layer over the same one may be in use.
            ResidentLayer(spec, _copied(self._switches[spec.path]), ids, read, in_place)
            for spec, ids, read in wanted
        ]
        return _computing(resident, self.backend, self.manifest.dtype)


def _copied(module: Module) -> Module:
    """The module over the same arrays, which can be replaced in it."""
    made = copy(module)
    for name, child in module.items():
        if isinstance(child, Module):
            made[name] = _copied(child)
    return made


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


class Partition:
    """The blocks that a process holds. Made by load_partition.

    Implements Experts for a model in the same process, and `compute` for a node. One caller at a
    time. `compute_dtype` is that of activations, `numerics` the id that promises identical bits.
    """

    def __init__(self, layers: Sequence[Layer], loader: Loader, precise: bool = True) -> None:
        self._layers = {layer.spec.layer: layer for layer in layers}
        self._natives = {number: layer.native for number, layer in self._layers.items()}
        self._precise, self._loader, self._backend = precise, loader, loader.backend
        self.compute_dtype = self._backend.compute_dtype(loader.manifest.dtype)
        self.numerics = self._backend.numerics(self.compute_dtype)

    @property
    def kernels(self) -> str:
        """What computes, for a person: "native avx2, int8 (f32 when asked)" or "mlx-cpu"."""
        if not self._backend.native:
            return self._backend.name
        mlx = [n for n, layer in sorted(self._layers.items()) if isinstance(layer, MlxLayer)]
        layers = f"; layers {', '.join(map(str, mlx))} {self._backend.name}" if mlx else ""
        return f"native {self._backend.isa}, int8 (f32 when asked){layers}"

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
        held = self._layer(layer, int(ids[0]))
        return held.compute(mode, rows, offsets, ids, weights, precise or mode == EXACT)

    def native(self, layer: int) -> object:
        """What native code computes a row of `layer` with, as `compute` would; None if nothing."""
        return self._natives.get(layer)

    def fitted(self, layer: int, experts: Ids, read: Callable[[int], Buffer]) -> Layer | None:
        """The layer with just these experts, for `put`; None without any. Changes nothing yet.

        Blocks that are held are copied; `read` gives the others', verified. Takes the layer's bytes
        once more meanwhile. Any thread.
        """
        held, spec = self._layers.get(layer), self._loader.manifest.layer(layer)
        if not len(experts):
            return None

        def fill(expert: int, pieces: Sequence[memoryview]) -> None:
            known = held is not None and expert in held.ids
            data = memoryview(held.block_bytes(expert) if held and known else read(expert))
            for piece in pieces:
                piece[:] = data[: len(piece)]
                data = data[len(piece) :]

        return self._loader.layers([(spec, np.sort(experts), fill)])[0]

    def put(self, layer: int, made: Layer | None) -> None:
        """Hold what `fitted` has made of a layer, and let go of what was held. As `compute`.

        Native code that was given the layer's experts goes on with the new ones.
        """
        if made is None:
            self._layers.pop(layer, None)
        else:
            self._layers[layer] = made
        native = None if made is None else made.native
        known = self._natives.setdefault(layer, native)
        if known is None:
            self._natives[layer] = native
        elif known is not native:
            if native is None:
                native = kernels.no_experts(self._loader.manifest.layer(layer).hidden)
            kernels.swap_experts(known, native)

    def _asked(self, layer: int, ids: mx.array) -> Layer:
        held = self._layers.get(layer)
        return self._layer(layer, int(np.asarray(ids).flat[0])) if held is None else held

    def _layer(self, layer: int, expert: int) -> Layer:
        held = self._layers.get(layer)
        if held is None:
            raise NotOwned(layer, expert)
        return held

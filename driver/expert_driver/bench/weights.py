"""How fast weights are used on this machine: the experts' kernels against its memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from expert_driver.bench.samples import Samples
from expert_network import kernels
from expert_network.backend import Backend
from expert_network.experts.partition import SUM, Partition, load_partition
from expert_network.store.manifest import TRUNK, Manifest
from expert_network.store.reader import Store

MEASURED_BYTES = 400_000_000  # of blocks that are gone through in turn: more than caches hold
STREAMS = 8  # runs of memory that are read at once, as kernels do: fewer are slower
ROWS = 128  # of the batch that is measured beside a single row
MEMORY, EXPERTS = "memory", "experts"

PRECISIONS = {"int8": False, "f32": True}


def per_token(config: dict[str, Any]) -> int:
    """How many experts of a layer a token is routed to, as the config says."""
    text = config.get("text_config") or config
    stated = text.get("num_experts_per_tok") or text.get("top_k_experts")
    return stated if isinstance(stated, int) else 1


def bytes_per_token(store: Store) -> int:
    """Bytes of weights that one token is multiplied with; of an embedding only a row is read,
    which is not taken off here."""
    routed = sum(layer.block_bytes for layer in store.manifest.layers) * per_token(store.config)
    return store.manifest.files[TRUNK].size + routed


def some_blocks(manifest: Manifest) -> dict[int, npt.NDArray[np.intp]]:
    """All blocks of the first layers, as many layers as MEASURED_BYTES take."""
    blocks, taken = {}, 0
    for spec in manifest.layers:
        if taken >= MEASURED_BYTES:
            break
        blocks[spec.layer] = np.arange(spec.experts)
        taken += spec.experts * spec.block_bytes
    return blocks


@dataclass(frozen=True)
class _Call:
    """One dispatch to the kernels: of `rows` rows, reading `nbytes` of weights."""

    layer: int
    rows: npt.NDArray[np.float32]
    ids: npt.NDArray[np.uint16]
    nbytes: int

    def seconds(self, partition: Partition, precise: bool) -> float:
        count, k = len(self.rows), len(self.ids) // len(self.rows)
        offsets = np.arange(0, count * k + 1, k, dtype=np.uint32)
        weights = np.full(len(self.ids), 1 / k, np.float32)
        started = perf_counter()
        partition.compute(self.layer, SUM, self.rows, offsets, self.ids, weights, precise)
        return perf_counter() - started


class Weights:
    """The blocks of a few layers, in memory, to be gone through by the kernels."""

    def __init__(self, store: Store, backend: Backend) -> None:
        self._partition = load_partition(store, some_blocks(store.manifest), backend)
        self._manifest, self._k = store.manifest, per_token(store.config)
        self._native = backend.native
        # As much as the blocks take, so that caches help no one; written once, to be there.
        self._plain = np.ones(max(1 << 20, self._partition.nbytes), np.uint8)
        self._precisions = PRECISIONS if backend.native else {backend.name: True}

    def measure(self, samples: Samples, seed: int) -> None:
        """One sample of each: memory, and one row on one thread and on all; ROWS rows on all."""
        most = kernels.threads() if self._native else 1
        try:
            for threads in sorted({1, most}):
                self._measure_one_row(samples, seed, threads)
        finally:
            if self._native:
                kernels.set_threads(most)
        for label, precise in self._precisions.items():
            seconds = self._batch(seed).seconds(self._partition, precise)
            rate = ROWS / seconds / len(self._manifest.layers)
            samples.add(EXPERTS, f"{ROWS} rows, {label}", "tok/s", "", rate)

    def _measure_one_row(self, samples: Samples, seed: int, threads: int) -> None:
        """Weights per second, and beside what memory gives to as many threads."""
        said = f"{threads} thread{'s' if threads > 1 else ''}"
        memory = None
        if self._native:
            kernels.set_threads(threads)
            memory = self._plain.nbytes / kernels.read_bandwidth(self._plain, STREAMS) / 1e9
            samples.add(MEMORY, said, "GB/s", "", memory)
        for label, precise in self._precisions.items():
            calls = list(self._single_rows(seed))
            seconds = sum(call.seconds(self._partition, precise) for call in calls)
            rate = sum(call.nbytes for call in calls) / seconds / 1e9
            at = f"1 row, {label}, {said}" if self._native else f"1 row, {label}"
            samples.add(EXPERTS, at, "GB/s", "", rate)
            if memory is not None:
                samples.add("experts / memory", at, "x", "", rate / memory)

    def _single_rows(self, seed: int) -> Iterator[_Call]:
        """Calls of one row that together go once through every block, in random order."""
        choose = random.Random(seed)
        for spec in self._manifest.layers:
            held = self._partition.owned(spec.layer).tolist()
            choose.shuffle(held)
            for start in range(0, len(held) - self._k + 1, self._k):
                ids = np.array(held[start : start + self._k], np.uint16)
                yield _Call(
                    spec.layer, _rows(1, spec.hidden, seed), ids, len(ids) * spec.block_bytes
                )

    def _batch(self, seed: int) -> _Call:
        """ROWS rows in the first layer, each with experts of its own."""
        spec, choose = self._manifest.layers[0], random.Random(seed)
        ids = [e for _ in range(ROWS) for e in choose.sample(range(spec.experts), self._k)]
        nbytes = len(set(ids)) * spec.block_bytes
        return _Call(spec.layer, _rows(ROWS, spec.hidden, seed), np.array(ids, np.uint16), nbytes)


def _rows(count: int, hidden: int, seed: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((count, hidden), np.float32)

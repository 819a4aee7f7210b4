"""Several partitions in one process, asked as nodes are, their answers put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from expert_network.backend import detect
from expert_network.experts.partition import EXACT, SUM, Partition, load_partition
from expert_network.store.reader import Store
from expert_roster.rendezvous import owner_table, partition
from expert_roster.roster import Roster

Floats = npt.NDArray[np.float32]


class Together:
    """Implements Experts over the partitions of `names`: each is asked for what it owns."""

    def __init__(self, store: Store, names: Sequence[str]) -> None:
        roster, shape = Roster.parse(",".join(names)), store.manifest.shape
        self.partitions = [
            load_partition(store, partition(roster, name, shape), detect()) for name in roster.names
        ]
        self._owners = {layer: rows[:, 0] for layer, rows in owner_table(roster, shape).items()}

    def outputs(self, layer: int, x: mx.array, ids: mx.array) -> mx.array:
        flat = np.asarray(ids).reshape(-1)
        found = np.empty((len(flat), x.shape[-1]), np.float32)
        ones = np.ones(ids.shape, np.float32)
        for node, pairs in self._split(layer, ids).items():
            found[pairs] = self._ask(node, EXACT, layer, x, ids, ones, pairs)
        return mx.array(found.reshape(*ids.shape, -1)).astype(x.dtype)

    def weighted_sum(self, layer: int, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        total = np.zeros(x.shape, np.float32)
        for node, pairs in self._split(layer, ids).items():
            rows = np.unique(pairs // ids.shape[1])
            total[rows] += self._ask(node, SUM, layer, x, ids, np.asarray(weights), pairs)
        return mx.array(total)

    def _split(self, layer: int, ids: mx.array) -> Mapping[int, npt.NDArray[np.intp]]:
        owner = self._owners[layer][np.asarray(ids).reshape(-1)]
        return {int(node): np.flatnonzero(owner == node) for node in np.unique(owner)}

    def _ask(
        self,
        node: int,
        mode: int,
        layer: int,
        x: mx.array,
        ids: mx.array,
        weights: Floats,
        pairs: npt.NDArray[np.intp],
    ) -> Floats:
        rows, counts = np.unique(pairs // ids.shape[1], return_counts=True)
        return self.partitions[node].compute(
            layer,
            mode,
            np.asarray(x.astype(mx.float32))[rows],
            np.cumsum([0, *counts]).astype(np.uint32),
            np.asarray(ids).reshape(-1)[pairs].astype(np.uint16),
            weights.reshape(-1)[pairs].astype(np.float32),
        )


def whole(store: Store) -> Partition:
    """All experts in one partition."""
    blocks = {layer: np.arange(experts) for layer, experts in store.manifest.shape}
    return load_partition(store, blocks, detect())

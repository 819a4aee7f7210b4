"""Weighted rendezvous hashing: which nodes own a block, worked out alike by every process.

Each node's name and each block are hashed once to 64 bits; one mixer combines the two, and the
node with the highest score is the block's first owner. A score depends on that node and that
block alone, so adding a node can only take blocks, and never moves one between two others.
docs/roster.md has the formula with test vectors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from expert_network.errors import RosterError
from expert_roster.roster import Roster

Ids = npt.NDArray[np.integer]
Indices = npt.NDArray[np.int32]
Hashes = npt.NDArray[np.uint64]
Scores = npt.NDArray[np.float64]

#: Scores worked out at once: 64 KB an array stays in cache and below malloc's mmap threshold
#: (24,576 blocks x 1,000 nodes: 0.5 s, and 1.0 s with 256 KB).
_CHUNK = 1 << 13
#: Up to here, one maximum after another beats sorting the row (same blocks: 0.6 s against 1.9 s).
_FEW = 8


def name_hash(name: str) -> int:
    """64 bits of a node name: BLAKE2b with an 8-byte digest, read big-endian."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def mix64(values: Hashes) -> Hashes:
    """One step of SplitMix64 (Steele, Lea, Flood 2014) from each of `values`, same shape."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def block_hashes(layers: Ids, experts: Ids) -> Hashes:
    """64 bits for each block: the mixed layer << 16 | expert. Shapes (n,), (n,) -> uint64 (n,).

    Raises RosterError for a layer or expert that does not fit 16 bits.
    """
    for what, ids in (("layer", layers), ("expert", experts)):
        if ids.size and not (ids.min() >= 0 and ids.max() < 1 << 16):
            raise RosterError(f"{what} ids must lie between 0 and 65535.")
    keys = layers.astype(np.uint64) << np.uint64(16) | experts.astype(np.uint64)
    return mix64(keys)


def scores(names: Hashes, weights: Scores, blocks: Hashes) -> Scores:
    """-weight / ln(h) of every node for every block: (n_nodes,) and (n_blocks,) hashes give
    float64 (n_blocks, n_nodes).

    h is an odd multiple of 2**-53, from the top 52 bits of the two hashes mixed: exact in float64,
    and never 0 or 1.
    """
    bits = mix64(blocks[:, None] ^ names[None, :]) >> np.uint64(12)
    h = (bits.astype(np.float64) + 0.5) * 2.0**-52
    return -weights / np.log(h)


def owner_order(roster: Roster, layer: int, experts: Ids) -> Indices:
    """All nodes, best first, for blocks of one layer: (n,) -> indices into names (n, n_nodes)."""
    layers = np.full(len(experts), layer)
    return _ranked(roster, block_hashes(layers, experts), len(roster.nodes))


def owners(roster: Roster, layers: Ids, experts: Ids) -> Indices:
    """The first R of each block's owner order: (n,), (n,) -> indices into names (n, R)."""
    return _ranked(roster, block_hashes(layers, experts), roster.replicas)


def owner_table(roster: Roster, shape: Sequence[tuple[int, int]]) -> dict[int, Indices]:
    """Owners of a whole model: `shape` lists (layer, experts); layer -> int32 (experts, R)."""
    return {
        layer: owners(roster, np.full(experts, layer), np.arange(experts))
        for layer, experts in shape
    }


def partition(
    roster: Roster, name: str, shape: Sequence[tuple[int, int]]
) -> dict[int, npt.NDArray[np.intp]]:
    """The blocks that node `name` owns: every layer of `shape` -> its expert ids, ascending.

    Raises RosterError if `name` is not in the roster.
    """
    index = roster.index(name)
    table = owner_table(roster, shape)
    return {layer: np.flatnonzero((rows == index).any(axis=1)) for layer, rows in table.items()}


def _ranked(roster: Roster, blocks: Hashes, count: int) -> Indices:
    names = np.array([name_hash(name) for name in roster.names], np.uint64)
    ranked = np.empty((len(blocks), count), np.int32)
    step = max(1, _CHUNK // len(names))
    for start in range(0, len(blocks), step):
        rows = slice(start, start + step)
        ranked[rows] = best_columns(scores(names, roster.weights, blocks[rows]), count)
    return ranked


def best_columns(table: Scores, count: int) -> Indices:
    """Columns of the `count` highest scores of each row, best first; ties go to the lower one.

    float64 (rows, columns) -> int32 (rows, count). Overwrites `table`.
    """
    if count > _FEW:
        return np.argsort(-table, axis=1, kind="stable")[:, :count].astype(np.int32)
    best = np.empty((len(table), count), np.int32)
    for place in range(count):
        best[:, place] = winners = table.argmax(axis=1)
        table[np.arange(len(table)), winners] = -np.inf
    return best

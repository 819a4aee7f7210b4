"""How one layer's rows are split over nodes: numpy in, each node's part in CSR form out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Index = npt.NDArray[np.intp]
Offsets = npt.NDArray[np.uint32]


# Not frozen, since that makes an object three times as slow to make, and each token makes many.
@dataclass(slots=True, eq=False)
class Share:
    """One node's part of a dispatch of N rows with k experts each.

    rows: which of the N rows, (R,), ascending. pairs: which of the N*k (row, expert) pairs, (P,),
    ascending; ids: uint16 and weights: float32, (P,), are theirs. Row r has the pairs offsets[r] to
    offsets[r + 1]; offsets is uint32 (R + 1,). Not to be written to.
    """

    rows: Index
    pairs: Index
    offsets: Offsets
    ids: npt.NDArray[np.uint16]
    weights: npt.NDArray[np.float32]

    def part(self, start: int, stop: int) -> Share:
        """The part of it that is its rows `start` to `stop`."""
        first, last = self.offsets[start], self.offsets[min(stop, len(self.rows))]
        own = slice(first, last)
        offsets = self.offsets[start : stop + 1] - first
        return Share(
            self.rows[start:stop], self.pairs[own], offsets, self.ids[own], self.weights[own]
        )


def divide(share: Share, owners: npt.NDArray[np.integer[Any]], node: int) -> Share | None:
    """The part of `share` whose pairs `owners` (P,) gives to `node`; None if there is none."""
    own = np.flatnonzero(owners == node)
    if not len(own):
        return None
    row_of_pair = np.repeat(np.arange(len(share.rows)), np.diff(share.offsets))
    rows, counts = np.unique(row_of_pair[own], return_counts=True)
    offsets = np.zeros(len(rows) + 1, np.uint32)
    np.cumsum(counts, out=offsets[1:])
    return Share(share.rows[rows], share.pairs[own], offsets, share.ids[own], share.weights[own])


def split(
    owners: npt.NDArray[np.integer[Any]],
    nodes: int,
    ids: npt.NDArray[np.integer[Any]],
    weights: npt.NDArray[np.float32],
) -> list[Share | None]:
    """Each node's Share, None for a node that has no part in it.

    owners: (N, k), the position of the node that computes each pair, as ids and weights.
    """
    flat = owners.reshape(-1)
    if len(owners) == 1:
        order, counts = _order_of_few(flat.tolist(), nodes)
    else:
        order = np.argsort(flat, kind="stable")
        counts = np.bincount(flat, minlength=nodes).tolist()
    ordered = order, ids.reshape(-1)[order].astype(np.uint16), weights.reshape(-1)[order]
    shares: list[Share | None] = []
    start = 0
    for count in counts:
        end = start + count
        shares.append(_share(*ordered, start, end, owners.shape) if count else None)
        start = end
    return shares


def _order_of_few(owners: list[int], nodes: int) -> tuple[Index, list[int]]:
    """The pairs of a decode step's one row by owner, where numpy's calls would cost more."""
    order = sorted(range(len(owners)), key=owners.__getitem__)
    return np.array(order, np.intp), [owners.count(node) for node in range(nodes)]


def _share(
    order: Index,
    ids: npt.NDArray[np.uint16],
    weights: npt.NDArray[np.float32],
    start: int,
    end: int,
    shape: tuple[int, ...],
) -> Share:
    pairs = order[start:end]
    rows, offsets = (_FIRST, _of_one(end - start)) if shape[0] == 1 else _rows(pairs, shape[1])
    return Share(rows, pairs, offsets, ids[start:end], weights[start:end])


def _rows(pairs: Index, k: int) -> tuple[Index, Offsets]:
    row_of_pair = pairs // k
    # A pair begins a row where its row differs from that of the pair before it.
    begins = np.flatnonzero(row_of_pair[1:] != row_of_pair[:-1]) + 1
    offsets = np.empty(len(begins) + 2, np.uint32)
    offsets[0], offsets[1:-1], offsets[-1] = 0, begins, len(pairs)
    return row_of_pair[offsets[:-1]], offsets


_FIRST = np.zeros(1, np.intp)


@lru_cache(64)
def _of_one(pairs: int) -> Offsets:
    return np.array((0, pairs), np.uint32)

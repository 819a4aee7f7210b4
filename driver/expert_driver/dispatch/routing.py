"""How one layer's rows are split over nodes: numpy in, each node's part in CSR form out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Index = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """One node's part of a dispatch of N rows with k experts each.

    rows: which of the N rows, (R,), ascending. pairs: which of the N*k (row, expert) pairs, (P,),
    ascending. Row r has the pairs offsets[r] to offsets[r + 1]; offsets is uint32 (R + 1,).
    """

    rows: Index
    pairs: Index
    offsets: npt.NDArray[np.uint32]

    def part(self, start: int, stop: int) -> Share:
        """The part of it that is its rows `start` to `stop`."""
        first, last = self.offsets[start], self.offsets[min(stop, len(self.rows))]
        offsets = self.offsets[start : stop + 1] - first
        return Share(self.rows[start:stop], self.pairs[first:last], offsets)


def split(owners: npt.NDArray[np.integer[Any]], nodes: int) -> list[Share | None]:
    """Each node's Share, None for a node that has no part in it.

    owners: (N, k), the position of the node that computes each pair.
    """
    if len(owners) == 1:
        return _split_row(owners[0].tolist(), nodes)
    flat = owners.reshape(-1)
    order = np.argsort(flat, kind="stable")
    ends = np.cumsum(np.bincount(flat, minlength=nodes))
    shares: list[Share | None] = []
    start = 0
    for end in ends.tolist():
        shares.append(_share(order[start:end], owners.shape[1]) if end > start else None)
        start = end
    return shares


_FIRST = np.zeros(1, np.intp)


def _split_row(owners: list[int], nodes: int) -> list[Share | None]:
    """`split` for a decode step's one row: numpy's calls would cost more than the work."""
    pairs: list[list[int]] = [[] for _ in range(nodes)]
    for pair, owner in enumerate(owners):
        pairs[owner].append(pair)
    return [
        Share(_FIRST, np.array(own, np.intp), np.array((0, len(own)), np.uint32)) if own else None
        for own in pairs
    ]


def _share(pairs: Index, k: int) -> Share:
    row_of_pair = pairs // k
    # A pair begins a row where its row differs from that of the pair before it.
    begins = np.flatnonzero(row_of_pair[1:] != row_of_pair[:-1]) + 1
    offsets = np.empty(len(begins) + 2, np.uint32)
    offsets[0], offsets[1:-1], offsets[-1] = 0, begins, len(pairs)
    return Share(row_of_pair[offsets[:-1]], pairs, offsets)

"""What a dispatch makes of its replies: one array, filled as they come."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from expert_driver.dispatch.routing import Index, Share
from expert_network.net import rows
from expert_protocol.dtypes import WireDType

Floats = npt.NDArray[np.float32]
Raw = npt.NDArray[Any]


class Values(Protocol):
    """`made` is whole once every place, that of a node in the roster's order, is finished."""

    made: Floats

    def put(self, place: int, share: Share, raw: Raw, dtype: WireDType) -> bool:
        """Take the values of one part; False if they are not all finite. `raw` is not kept."""

    def finish(self, place: int) -> None:
        """Say that no more comes for this place."""


class Sums:
    """The partial sums of all nodes, (N, D), added in the order of places, whoever is first.

    So neither the order of --nodes nor that of the replies is in the bits.
    """

    def __init__(self, count: int, hidden: int, places: int) -> None:
        self.made: Floats = np.zeros((count, hidden), np.float32)
        self._finished = [False] * places
        self._turn = 0
        #: What came before its turn, by place.
        self._kept: dict[int, list[tuple[Index, Floats]]] = {}

    def put(self, place: int, share: Share, raw: Raw, dtype: WireDType) -> bool:
        if place == self._turn:
            whole = len(share.rows) == len(self.made)
            return rows.add(self.made, None if whole else share.rows, raw, dtype)
        values, finite = rows.decode(raw, dtype)
        if np.may_share_memory(values, raw):
            values = values.copy()
        self._kept.setdefault(place, []).append((share.rows, values))
        return finite

    def finish(self, place: int) -> None:
        finished = self._finished
        # More places than were foreseen: what one node did not answer was asked of others.
        finished.extend([False] * (place + 1 - len(finished)))
        finished[place] = True
        while self._turn < len(finished) and finished[self._turn]:
            self._turn += 1
            for kept, values in self._kept.pop(self._turn, ()):
                self.made[kept] += values


class Outputs:
    """The output of each of P pairs, (P, D)."""

    def __init__(self, pairs: int, hidden: int) -> None:
        self.made: Floats = np.empty((pairs, hidden), np.float32)

    def put(self, place: int, share: Share, raw: Raw, dtype: WireDType) -> bool:
        values, finite = rows.decode(raw, dtype)
        self.made[share.pairs] = values
        return finite

    def finish(self, place: int) -> None:
        pass

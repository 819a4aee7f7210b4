"""A decode step's dispatch: one row, one weighted sum, sent and gathered by two native calls.

It is for links on which nothing else is under way, and for replies that are what is due. Anything
else it hands over to the exchange: what has been asked, what was sent of it and what has come.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt

from expert_driver.dispatch.gathering import Call, Gathering, Job
from expert_driver.dispatch.network import Network
from expert_driver.dispatch.routing import split
from expert_driver.dispatch.values import Floats, Sums
from expert_driver.figures import NodeTimes
from expert_network import kernels
from expert_network.net.rows import encode
from expert_protocol.dtypes import WireDType
from expert_protocol.frames import ReplyMode, heads_of_one_row, reply_size
from expert_protocol.header import HEADER_SIZE

#: An array of one row: a buffer, and what NumPy makes an array of.
Values = Any

_native: Any = kernels._native if kernels.available() else None
if not hasattr(_native, "fan_out"):
    _native = None

MOST_NODES = 256  # of fanout.c
#: Until what has not come is left to the exchange, which knows about deadlines.
WAIT_S = 0.1
#: To wait for one node before the others are looked at.
LOOK_S = 0.005
# What stands where in a row of a plan, as fanout.c has it.
_DESCRIPTOR, _SEQUENCE, _PAIRS, _, _SENT, _GOT = range(6)
_COLUMNS, _TIMES, _SUMS = 16, slice(6, 10), slice(10, 16)
_WHOLE, _NOT_TAKEN = 1, 2  # what fan_out gives


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """What is the same in all dispatches of a layer; native: the same for fan_out and fan_in."""

    number: int
    hidden: int
    owners: npt.NDArray[np.int32]
    native: object


class Fanout:
    """One-row dispatches to all nodes of `network`, as long as its links are these.

    A layer is first asked through the exchange, which checks all that is the same in later ones.
    """

    def __init__(self, network: Network, dtype: WireDType, precise: bool) -> None:
        self.network, self.links = network, network.links
        self.dtype, self.precise = dtype, precise
        self.agreement, self.figures = network.agreement, network.figures_of_links
        self.plan = np.zeros((len(self.links), _COLUMNS), np.int64)
        self.plan[:, _DESCRIPTOR] = [link.descriptor for link in self.links]
        self.rooms = np.empty((len(self.links), 0), np.uint8)
        self._layers: dict[tuple[int, int], _Layer] = {}
        #: What is under way.
        self.row: Row | None = None
        #: Whether the plan has the sequence numbers, and the links lag behind.
        self._ahead = False

    @classmethod
    def over(cls, network: Network, dtype: WireDType, precise: bool) -> Fanout | None:
        """None where there is no native way, or too many nodes for it."""
        if _native is None or len(network.links) > MOST_NODES:
            return None
        return cls(network, dtype, precise)

    def begin(
        self, layer: int, hidden: int, row: Values, ids: Values, weights: Floats
    ) -> Row | None:
        """Ask for one row; None if the exchange has to.

        row: float32 or raw, (1, D) or (1, columns(D)). ids: uint32 and weights: float32, (1, k);
        the exchange takes other types.
        """
        known = self._layers.get((layer, hidden))
        if known is None:
            self._layers[layer, hidden] = self._learn(layer, hidden)
            return None
        if self.row is not None or not (self._ahead or self._quiet()):
            return None
        asked = Row(self, known, row, ids, weights)
        self.row = asked  # before an interrupt can come: who abandons then closes its links
        sent = _native.fan_out(known.native, row, ids, weights)
        if sent == _NOT_TAKEN:
            self.row = None
            return None
        if sent != _WHOLE:
            self.settle()
        return asked

    def settle(self) -> None:
        """Hand over to the exchange what is under way, and to the links what has been done."""
        if self._ahead:
            self.count()
            self._ahead = False
            row, self.row = self.row, None
            for link, lane in zip(self.links, self.plan.tolist(), strict=True):
                if not link.closed:
                    # What is under way is asked once more, but of the connection alone.
                    again = row is not None and lane[_PAIRS] > 0
                    link.connection.skip_to(lane[_SEQUENCE] - again)
            if row is not None:
                row.hand_over()

    def count(self) -> None:
        """Add what has been done to the figures of the nodes and of the streams."""
        sums, nodes = self.plan[:, _SUMS], self.figures
        for link, figures, done in zip(self.links, nodes, sums.tolist(), strict=True):
            dispatches, pairs, queue_us, compute_us, sent, got = done
            figures.add(dispatches, dispatches, pairs, queue_us, compute_us, sent, got)
            link.stream.bytes_sent += sent
            link.stream.bytes_received += got
        sums[:] = 0

    def _learn(self, layer: int, hidden: int) -> _Layer:
        epoch = self.agreement.roster.epoch
        adopt = layer in self.agreement.adopted
        head, due = heads_of_one_row(layer, epoch, self.dtype, self.precise, hidden, adopt)
        room = 2 * HEADER_SIZE + reply_size(1, 0, hidden, ReplyMode.SUM, self.dtype)
        if room > self.rooms.shape[1]:
            self.rooms = np.empty((len(self.links), room), np.uint8)
            self._layers.clear()  # what comes for them lies elsewhere
        owners = np.ascontiguousarray(self.agreement.chosen[layer], np.int32)
        same = self.plan, self.rooms, head, due, owners, self.dtype, hidden
        return _Layer(layer, hidden, owners, _native.fan_layer(*same))

    def _quiet(self) -> bool:
        """Whether nothing is under way; then the plan's numbers are the links' own."""
        # Another plan for these links may be ahead of them: it must not be used again as it is.
        exchange = self.network.exchange
        exchange.settle()
        exchange.settle, exchange.count = self.settle, self.count
        for link in self.links:
            if link.owed or link.waiting or not link.stream.quiet:
                return False
            link.stream.wait_at_most(LOOK_S)
        self.plan[:, _SEQUENCE] = [link.connection.sequence for link in self.links]
        self._ahead = True
        return True


class Row:
    """One dispatch. `traffic`: the bytes that went and came, once all are there."""

    __slots__ = (
        "_began", "_fanout", "_gathering", "_ids", "_layer", "_row", "_weights", "traffic"
    )  # fmt: skip

    def __init__(
        self, fanout: Fanout, layer: _Layer, row: Values, ids: Values, weights: Values
    ) -> None:
        self._fanout, self._layer = fanout, layer
        self._row, self._ids, self._weights = row, ids, weights
        self._began = monotonic()
        self._gathering: Gathering | None = None
        self.traffic = 0

    def wait(self) -> Floats:
        """The weighted sum, (1, D). Raises NodeError."""
        fanout = self._fanout
        exchange = fanout.network.exchange
        if self._gathering is None:
            try:
                if exchange.looks:
                    exchange.look()
                total = np.empty((1, self._layer.hidden), np.float32)
                seconds = min(WAIT_S, exchange.hedges_after())
                self.traffic = _native.fan_in(self._layer.native, total, seconds)
            except BaseException:
                exchange.abandon()
                raise
            if self.traffic:
                fanout.row = None
                return total
            fanout.settle()
        assert self._gathering is not None
        made = exchange.wait(self._gathering)
        self.traffic = self._gathering.traffic
        return made

    def times(self) -> tuple[NodeTimes, ...]:
        """What it took, before anything else is asked."""
        if self._gathering is not None:
            return self._gathering.times()
        found = []
        for link, lane in zip(self._fanout.links, self._fanout.plan.tolist(), strict=True):
            if lane[_PAIRS]:
                queue_us, compute_us, sent_at, replied_at = lane[_TIMES]
                spent = (sent_at / 1e9, replied_at / 1e9, queue_us, compute_us)
                found.append(NodeTimes(link.name, *spent, lane[_SENT], lane[_GOT]))
        return tuple(found)

    def hand_over(self) -> None:
        """Let the exchange go on with it."""
        fanout, layer, dtype = self._fanout, self._layer, self._fanout.dtype
        links, ids, weights = fanout.links, np.asarray(self._ids), np.asarray(self._weights)
        row = np.asarray(self._row)
        raw = encode(row, dtype)[0] if row.dtype == np.float32 else row
        epoch, k = fanout.agreement.roster.epoch, ids.shape[1]
        call = Call(layer.number, epoch, ReplyMode.SUM, {dtype: raw}, k, fanout.precise)
        shares = split(layer.owners[ids], len(links), ids, weights)
        jobs, sent, came = [], [], []
        for n, (share, lane) in enumerate(zip(shares, fanout.plan.tolist(), strict=True)):
            if share is not None:
                adopt = layer.number in fanout.agreement.adopted
                jobs.append(Job(links[n], call, dtype, [share], fanout.figures[n], adopt))
                sent.append(lane[_SENT])
                came.append(fanout.rooms[n, : lane[_GOT]].data)
        self._gathering = Gathering(jobs, Sums(1, layer.hidden, len(jobs)))
        fanout.network.exchange.adopt(self._gathering, self._began, sent, came)

"""A decode step's dispatches, one row in sum mode: from the socket and back in native code.

Where native kernels compute, one call answers what comes as long as nothing else does, without the
interpreter. Where Python does, each dispatch comes back here to be computed.

It knows the forms of dispatch that its link has answered before, by their heads. Whatever is not a
whole frame of such a form is left to the stream, with what has come of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from expert_network import kernels
from expert_network.net.stream import Buffer, FrameStream
from expert_node.compute import Computer
from expert_node.metrics import BOUNDS, Counts
from expert_protocol.connection import NodeConnection, NodeEvent
from expert_protocol.frames import (
    Dispatch,
    ErrorReply,
    Reply,
    ReplyMode,
    WireDType,
    dispatch_size,
    encode_working,
    heads_of_one_row,
)
from expert_protocol.header import EPOCH, HEADER_SIZE

_native: Any = kernels._native if kernels.available() else None

#: Forms of dispatch that a link keeps: a few for each layer.
MOST_FORMS = 1024
MOST_PAIRS = 256  # of single.c
# What stands where in a lane, as single.c has it, and what serve_rows gives.
_SEQUENCE, _MOVED, _PAIRS, _WHICH, _SINCE, _BEGAN, _ENDING = range(7)
_DISPATCHES, _ALL_PAIRS, _QUEUE_US, _COMPUTE_US, _RECEIVED, _SENT = range(7, 13)
_QUEUED = slice(13, 13 + len(BOUNDS) + 1)
_COMPUTED = slice(_QUEUED.stop, _QUEUED.stop + len(BOUNDS) + 1)
_LEFT, _ANSWERED, _FAILED, _NOT_FINITE, _CUT = range(5)
_BOUNDS_US = np.array(BOUNDS) * 1e6


class Ending(Protocol):
    """Why no link may go on, once its node is draining."""

    ending: str | None


class _Form(NamedTuple):
    """A form of dispatch; row: where its row is decoded to, (1, D)."""

    layer: int
    dtype: WireDType
    precise: bool
    row: NDArray[np.float32]


class Single:
    """One link's dispatches of one row. Used by the link's thread, but for what says otherwise.

    sending: the lock around what goes out.
    """

    there = hasattr(_native, "serve_rows")

    def __init__(
        self,
        computer: Computer,
        stream: FrameStream[NodeEvent],
        connection: NodeConnection,
        hidden: Callable[[int], int],
        max_payload: int,
        sending: Any,
    ) -> None:
        self._computer, self._stream, self._connection = computer, stream, connection
        self._hidden, self._max_payload = hidden, max_payload
        self._sending = sending
        self._lane = np.zeros(_COMPUTED.stop, np.int64)
        self._memory = memoryview(b"")
        self._row = np.empty(0, np.float32)
        self._heads, self._dues = np.empty((2, 0, 28), np.uint8)
        self._facts = np.empty((0, 5), np.int32)
        self._experts: tuple[object, ...] = ()
        self._known: set[bytes] = set()
        self._forms: list[_Form] = []
        self._asked: dict[tuple[int, int], tuple[Any, ...]] = {}
        #: The native side of all this; None when some of it has changed.
        self._single: object = None
        self._error: Exception | None = None
        self._version = computer.version
        #: The node's, which replies carry where it is later than that of their dispatch.
        self._epoch = 0

    def announce(self, epoch: int) -> None:
        """Carry the node's `epoch` from now on. Any thread, which holds `sending`."""
        self._epoch = epoch
        raise_epochs(self._dues, epoch)

    def learn(self, dispatch: Dispatch) -> None:
        """Know the form of a dispatch that has been answered."""
        if len(dispatch.rows) != 1 or dispatch.mode or len(self._forms) >= MOST_FORMS:
            return
        layer, dtype, precise = dispatch.layer, dispatch.dtype, dispatch.precise
        hidden = self._hidden(layer)
        head, due = heads_of_one_row(layer, dispatch.epoch, dtype, precise, hidden, dispatch.adopt)
        if head in self._known:
            return
        if hidden > self._row.size:
            self._row = np.empty(hidden, np.float32)
            self._forms = [form._replace(row=self._of(form.row.size)) for form in self._forms]
        self._known.add(head)
        self._forms.append(_Form(layer, dtype, precise, self._of(hidden)))
        row, more = (dispatch_size(1, pairs, hidden, dtype) for pairs in (0, 1))
        pairs = min(MOST_PAIRS, (self._max_payload - row) // (more - row))
        facts = np.array((self._computer.layers[layer], dtype, hidden, pairs, precise), np.int32)
        self._heads = np.vstack([self._heads, np.frombuffer(head, np.uint8)])
        with self._sending:  # nobody announces an epoch meanwhile
            self._dues = np.vstack([self._dues, np.frombuffer(due, np.uint8)])
            raise_epochs(self._dues, self._epoch)
        self._facts = np.vstack([self._facts, facts])
        self._experts = (*self._experts, self._computer.native(layer))
        self._single = None

    def serve(self, links: Ending, send_timeout: float) -> Reply | ErrorReply | None:
        """Answer what comes until it is anything else, or `links` end.

        Anything else is then the stream's; an answer is for the connection to give. Raises
        NodeTimeout or NodeClosed if a reply cannot be sent; the stream's timeout is `send_timeout`.
        """
        stream, lane = self._stream, self._lane
        if not (self._forms and stream.quiet):
            return None
        if self._version != self._computer.version:
            self._renew()
        lane[_SEQUENCE] = self._connection.sequence
        single, result = self._ready(), _ANSWERED
        while result == _ANSWERED and links.ending is None:
            if stream.looks:
                stream.look()
            result = _native.serve_rows(single, stream.fileno(), self._compute, stream.looks)
        sequence, moved = int(lane[_SEQUENCE]), int(lane[_MOVED])
        if result == _CUT:
            raise stream.broken(moved, send_timeout)
        if result in (_LEFT, _ANSWERED):
            self._connection.skip_to(sequence)
            stream.take_over(moved if result == _LEFT else 0, int(lane[_BEGAN]) / 1e9)
            return None
        return self._answer(sequence, result)

    @property
    def since(self) -> float | None:
        """When, by monotonic(), the dispatch at hand came; None between two. Any thread."""
        since = int(self._lane[_SINCE])
        return since / 1e9 if since else None

    def end(self) -> None:
        """Serve no more than the dispatch at hand. Any thread."""
        self._lane[_ENDING] = 1

    def working(self) -> Sequence[Buffer]:
        """A WORKING about the dispatch at hand. Any thread."""
        return encode_working(int(self._lane[_SEQUENCE]))

    def counts(self) -> Counts:
        """What has been answered here, all together. Any thread."""
        lane = self._lane.tolist()
        dispatches = lane[_DISPATCHES]
        return Counts(
            dispatches, dispatches, lane[_ALL_PAIRS], lane[_QUEUE_US] / 1e6,
            lane[_COMPUTE_US] / 1e6, lane[_QUEUED], lane[_COMPUTED],
        )  # fmt: skip

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes received and sent, beside those that the stream counts. Any thread."""
        return int(self._lane[_RECEIVED]), int(self._lane[_SENT])

    def _ready(self) -> object:
        memory = self._stream.room()
        if self._single is None or memory is not self._memory:
            self._memory = memory
            self._asked.clear()
            self._single = _native.single(
                self._lane, memory, self._heads, self._dues, self._facts, self._computer.held,
                self._row, _BOUNDS_US, self._experts, self._computer.turns, self._sending,
            )  # fmt: skip
        return self._single

    def _compute(self, which: int, pairs: int) -> NDArray[np.float32] | None:
        """What the blocks make of the dispatch that came, in its turn; None if they fail."""
        asked = self._asked.get((which, pairs)) or self._ask(which, pairs)
        computer = self._computer
        try:
            with computer.turns:
                self._lane[_BEGAN] = perf_counter_ns()
                values = computer.blocks.compute(*asked)
                return values if values.flags.c_contiguous else np.ascontiguousarray(values)
        except Exception as error:
            self._error = error
            return None

    def _ask(self, which: int, pairs: int) -> tuple[Any, ...]:
        """What blocks are given for a dispatch of this form, which lies where all of them do."""
        form = self._forms[which]
        at = dispatch_size(1, 0, form.row.size, form.dtype) + HEADER_SIZE
        ids = np.ndarray((pairs,), np.uint16, self._memory, at)
        weights = np.ndarray((pairs,), np.float32, self._memory, at + 2 * pairs)
        asked = (
            form.layer, ReplyMode.SUM, form.row, _offsets(pairs), ids, weights, form.precise
        )  # fmt: skip
        if len(self._asked) < MOST_FORMS:
            self._asked[which, pairs] = asked
        return asked

    def _renew(self) -> None:
        """Ask anew what native code computes with: the blocks have changed."""
        self._version = self._computer.version
        self._experts = tuple(self._computer.native(form.layer) for form in self._forms)
        self._single = None

    def _answer(self, sequence: int, result: int) -> Reply | ErrorReply:
        """Let the connection meet the dispatch, which lies where it came, and answer it."""
        connection, memory, lane = self._connection, self._memory, self._lane
        connection.skip_to(sequence - 1)
        connection.feed(memory[:HEADER_SIZE])
        event = connection.feed(memory[HEADER_SIZE : HEADER_SIZE + connection.needs])
        lane[_SINCE] = 0
        form, error = self._forms[int(lane[_WHICH])], self._error
        self._error = None
        if result == _NOT_FINITE:
            return self._computer.cannot_carry(form.layer, form.dtype)
        if (
            error is None
            and self._version != self._computer.version
            and isinstance(event, Dispatch)
        ):
            # It names a block that came after native code had learned what is here.
            return self._computer.answer(event)
        return self._computer.failed(form.layer, error or MemoryError("for a row"))

    def _of(self, hidden: int) -> NDArray[np.float32]:
        return self._row[:hidden].reshape(1, hidden)


def raise_epochs(heads: NDArray[np.uint8], epoch: int) -> None:
    """Write `epoch` into the heads that have an earlier one, where they lie: uint8 (n, 28)."""
    epochs = heads[:, EPOCH].view("<u4")
    np.maximum(epochs, np.uint32(epoch), out=epochs)


@lru_cache(MOST_PAIRS)
def _offsets(pairs: int) -> NDArray[np.uint32]:
    return np.array((0, pairs), np.uint32)

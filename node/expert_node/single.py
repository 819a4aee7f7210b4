"""A decode step's dispatch, one row in sum mode: from the socket and back by two native calls.

It knows the forms of dispatch that its link has answered before, by their heads. Whatever is not a
whole frame of such a form is left to the stream, with what has come of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from expert_network import kernels
from expert_network.net.rows import encode
from expert_network.net.stream import Buffer, FrameStream
from expert_node.compute import Computed, Computer
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
    reply_size,
)
from expert_protocol.header import HEADER_SIZE

_native: Any = kernels._native if kernels.available() else None

#: Forms of dispatch that a link keeps: a few for each layer.
MOST_FORMS = 1024
MOST_PAIRS = 256  # of single.c
# What stands where in a lane, as single.c has it.
_SEQUENCE, _MOVED, _PAIRS, _WHICH = range(4)


class _Form(NamedTuple):
    """A form of dispatch; due: the head of its reply; row: where its row is decoded to, (1, D)."""

    layer: int
    dtype: WireDType
    precise: bool
    due: bytes
    size: int
    row: NDArray[np.float32]


class Single:
    """One link's dispatches of one row. Used by the link's thread, but for `working`.

    at_hand: whether one is being computed, of which the connection knows nothing.
    """

    there = hasattr(_native, "await_row")

    def __init__(
        self,
        computer: Computer,
        stream: FrameStream[NodeEvent],
        connection: NodeConnection,
        hidden: Callable[[int], int],
        max_payload: int,
    ) -> None:
        self._computer, self._stream, self._connection = computer, stream, connection
        self._hidden, self._max_payload = hidden, max_payload
        self.at_hand = False
        #: Bytes of what was received and answered here, beside those that the stream counts.
        self.received = self.sent = 0
        self._lane = np.zeros(4, np.int64)
        self._memory = memoryview(b"")
        self._row = np.empty(0, np.float32)
        self._heads, self._facts = np.empty((0, 28), np.uint8), np.empty((0, 4), np.int32)
        self._known: dict[bytes, int] = {}
        self._forms: list[_Form] = []
        self._asked: dict[tuple[int, int], tuple[Any, ...]] = {}
        #: Whether all that came lately was answered here: the connection's numbers lag behind then.
        self._ahead = False

    def learn(self, dispatch: Dispatch) -> None:
        """Know the form of a dispatch that has been answered."""
        if len(dispatch.rows) != 1 or dispatch.mode or len(self._forms) >= MOST_FORMS:
            return
        hidden = self._hidden(dispatch.layer)
        head, due = heads_of_one_row(
            dispatch.layer, dispatch.epoch, dispatch.dtype, dispatch.precise, hidden
        )
        if head in self._known:
            return
        self._known[head] = len(self._forms)
        if hidden > self._row.size:
            self._row = np.empty(hidden, np.float32)
            self._forms = [form._replace(row=self._of(form.row.size)) for form in self._forms]
        size = HEADER_SIZE + reply_size(1, 0, hidden, ReplyMode.SUM, dispatch.dtype)
        self._forms.append(
            _Form(dispatch.layer, dispatch.dtype, dispatch.precise, due, size, self._of(hidden))
        )
        row, more = (dispatch_size(1, pairs, hidden, dispatch.dtype) for pairs in (0, 1))
        pairs = min(MOST_PAIRS, (self._max_payload - row) // (more - row))
        facts = (self._computer.layers[dispatch.layer], dispatch.dtype, hidden, pairs)
        self._asked.clear()
        self._heads = np.vstack([self._heads, np.frombuffer(head, np.uint8)])
        self._facts = np.vstack([self._facts, np.array(facts, np.int32)])

    def receive(self, last: float) -> bool:
        """Wait for what comes; True if it is a dispatch that `compute` can take.

        Otherwise the stream has it, whatever it is. last: when, by monotonic(), the last frame came
        or went.
        """
        if not (self._ahead or self._begin()):
            return False
        stream, lane = self._stream, self._lane
        if stream.looks:
            stream.look()
        if not _native.await_row(
            stream.fileno(), lane, self._memory, self._heads, self._facts, self._computer.held,
            self._row,
        ):  # fmt: skip
            self._settle(int(lane[_SEQUENCE]))
            stream.take_over(int(lane[_MOVED]), last)
            return False
        self.at_hand = True
        return True

    def compute(self) -> Computed | ErrorReply:
        """What the blocks make of the dispatch that came, in its turn."""
        _, moved, pairs, which = self._lane.tolist()
        self.received += moved
        asked = self._asked.get((which, pairs)) or self._ask(which, pairs)
        try:
            return self._computer.compute(*asked)
        except Exception as error:
            return self._computer.failed(self._forms[which].layer, error)

    def answer(self, made: Computed | ErrorReply) -> tuple[Reply | ErrorReply, int] | None:
        """Send the reply; else what the connection has to answer, and how much of that has gone."""
        self.at_hand = False
        sequence, _, _, which = self._lane.tolist()
        form = self._forms[which]
        if isinstance(made, ErrorReply):
            return self._hand_over(sequence, made), 0
        values, queue_us, compute_us = made
        if not values.flags.c_contiguous:
            values = np.ascontiguousarray(values)
        if not _native.answer_row(
            self._stream.fileno(), self._lane, form.due, values, form.dtype, queue_us, compute_us
        ):
            refusal = self._computer.cannot_carry(form.layer, form.dtype)
            return self._hand_over(sequence, refusal), 0
        sent = int(self._lane[_MOVED])
        if sent == form.size:
            self.sent += sent
            return None
        data, _ = encode(values, form.dtype)
        reply = Reply(ReplyMode.SUM, form.dtype, queue_us, compute_us, data)
        return self._hand_over(sequence, reply), sent

    def working(self) -> Sequence[Buffer]:
        """A WORKING about the dispatch at hand."""
        return encode_working(int(self._lane[_SEQUENCE]))

    def _begin(self) -> bool:
        """Whether what comes next can come here."""
        if not (self._forms and self._stream.quiet):
            return False
        self._lane[_SEQUENCE] = self._connection.sequence
        memory = self._stream.room()
        if memory is not self._memory:
            self._memory = memory
            self._asked.clear()
        self._ahead = True
        return True

    def _ask(self, which: int, pairs: int) -> tuple[Any, ...]:
        """What Computer.compute is given for a dispatch of this form, wherever its memory is."""
        form = self._forms[which]
        at = HEADER_SIZE + form.dtype.row_bytes(form.row.size) + 8
        ids = np.ndarray((pairs,), np.uint16, self._memory, at)
        weights = np.ndarray((pairs,), np.float32, self._memory, at + 2 * pairs)
        asked = (
            form.layer, ReplyMode.SUM, form.row, _offsets(pairs), ids, weights, form.precise
        )  # fmt: skip
        if len(self._asked) < MOST_FORMS:
            self._asked[which, pairs] = asked
        return asked

    def _settle(self, sequence: int) -> None:
        """Let the connection go on after `sequence`."""
        self._ahead = False
        self._connection.skip_to(sequence)

    def _hand_over(self, sequence: int, answer: Reply | ErrorReply) -> Reply | ErrorReply:
        """Let the connection meet the dispatch, which lies where it came."""
        connection, memory = self._connection, self._memory
        self._settle(sequence - 1)
        connection.feed(memory[:HEADER_SIZE])
        connection.feed(memory[HEADER_SIZE : HEADER_SIZE + connection.needs])
        return answer

    def _of(self, hidden: int) -> NDArray[np.float32]:
        return self._row[:hidden].reshape(1, hidden)


@lru_cache(MOST_PAIRS)
def _offsets(pairs: int) -> NDArray[np.uint32]:
    return np.array((0, pairs), np.uint32)

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
        self._lane = np.zeros(4, np.int64)
        self._memory = memoryview(b"")
        self._row = np.empty(0, np.float32)
        self._heads, self._facts = np.empty((0, 28), np.uint8), np.empty((0, 4), np.int32)
        self._known: dict[bytes, int] = {}
        self._forms: list[_Form] = []

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
        self._heads = np.vstack([self._heads, np.frombuffer(head, np.uint8)])
        self._facts = np.vstack([self._facts, np.array(facts, np.int32)])

    def receive(self) -> bool:
        """Wait for what comes; True if it is a dispatch that `compute` can take.

        Otherwise the stream has it, whatever it is.
        """
        stream, connection, lane = self._stream, self._connection, self._lane
        if not (self._forms and stream.quiet):
            return False
        lane[_SEQUENCE] = connection.sequence
        self._memory = stream.room()
        fine: bool = _native.await_row(
            stream.fileno(), lane, self._memory, self._heads, self._facts, self._computer.held,
            self._row,
        )  # fmt: skip
        stream.came(int(lane[_MOVED]), fine)
        self.at_hand = fine
        return fine

    def compute(self) -> Computed | ErrorReply:
        """What the blocks make of the dispatch that came, in its turn."""
        _, _, pairs, which = self._lane.tolist()
        form = self._forms[which]
        at = HEADER_SIZE + form.dtype.row_bytes(form.row.size) + 8
        ids = np.ndarray((pairs,), np.uint16, self._memory, at)
        weights = np.ndarray((pairs,), np.float32, self._memory, at + 2 * pairs)
        try:
            return self._computer.compute(
                form.layer, ReplyMode.SUM, form.row, _offsets(pairs), ids, weights, form.precise
            )
        except Exception as error:
            return self._computer.failed(form.layer, error)

    def answer(self, made: Computed | ErrorReply) -> tuple[Reply | ErrorReply, int] | None:
        """Send the reply; else what the connection has to answer, and how much of that has gone."""
        self.at_hand = False
        sequence, _, _, which = self._lane.tolist()
        form = self._forms[which]
        if isinstance(made, ErrorReply):
            return self._hand_over(made), 0
        values = np.ascontiguousarray(made.values)
        if not _native.answer_row(
            self._stream.fileno(), self._lane, form.due, values, form.dtype, *made[1:]
        ):
            return self._hand_over(self._computer.cannot_carry(form.layer, form.dtype)), 0
        sent = int(self._lane[_MOVED])
        if sent == form.size:
            self._stream.went(sent)
            self._connection.skip_to(sequence)
            return None
        data, _ = encode(values, form.dtype)
        return self._hand_over(Reply(ReplyMode.SUM, form.dtype, *made[1:], data)), sent

    def working(self) -> Sequence[Buffer]:
        """A WORKING about the dispatch at hand."""
        return encode_working(int(self._lane[_SEQUENCE]))

    def _hand_over(self, answer: Reply | ErrorReply) -> Reply | ErrorReply:
        """Let the connection meet the dispatch, which lies where it came."""
        connection, memory = self._connection, self._memory
        connection.skip_to(int(self._lane[_SEQUENCE]) - 1)
        connection.feed(memory[:HEADER_SIZE])
        connection.feed(memory[HEADER_SIZE : HEADER_SIZE + connection.needs])
        return answer

    def _of(self, hidden: int) -> NDArray[np.float32]:
        return self._row[:hidden].reshape(1, hidden)


@lru_cache(MOST_PAIRS)
def _offsets(pairs: int) -> NDArray[np.uint32]:
    return np.array((0, pairs), np.uint32)

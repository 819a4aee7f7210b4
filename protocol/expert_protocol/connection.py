"""The two ends of a link, without its I/O: bytes in, events out, buffers to send.

    while (event := connection.feed(exactly(connection.needs))) is None: ...

A connection owns no payload memory. `needs` says how many bytes come next: 32 for a header, then
that header's payload, whose size has been checked against everything known by then. `feed` takes
exactly these bytes. The event's arrays are views of what was fed last.

Everything that changes the state of a link is in the two tables of states.py. What we may not send
raises LocalProtocolError and changes nothing. What the peer may not send raises RemoteProtocolError
and ends the link: only one `refuse` can follow.

Up to MAX_OUTSTANDING dispatches may wait for their answers at a time. They are answered in the
order in which they were sent, so REPLY, ERROR and WORKING are always about the oldest, and carry
its sequence number. WAITING ends with the last of them.

Both ends stand in this one file, so that what one may send is read beside what the other takes.

A connection has no lock. A node that sends WORKING from another thread than its replies holds one
lock around `working` and `reply`, each with the sending of its buffers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar
from zlib import crc32

from expert_network.errors import LocalProtocolError, RemoteProtocolError
from expert_protocol.dtypes import WireDType
from expert_protocol.frames import (
    TIMES_SIZE,
    Dispatch,
    ErrorReply,
    Goodbye,
    Hello,
    Ping,
    Pong,
    Reply,
    Welcome,
    Working,
    asked_bytes,
    decode_error,
    decode_goodbye,
    decode_hello,
    decode_welcome,
    dispatch_in,
    encode_dispatch,
    encode_error,
    encode_goodbye,
    encode_hello,
    encode_ping,
    encode_pong,
    encode_reply,
    encode_welcome,
    encode_working,
    pairs_in,
    reply_in,
)
from expert_protocol.header import (
    HEADER_SIZE,
    MAX_HIDDEN,
    MAX_OUTSTANDING,
    MAX_PAYLOAD,
    MAX_ROWS,
    MAX_U32,
    SUMMED_SIZE,
    VERSION,
    Buffer,
    Checksum,
    ErrorCode,
    Header,
    Kind,
    crc_of,
    decode_header,
    encode_frame,
    encode_head,
)
from expert_protocol.states import DRIVER_SENDS, NODE_SENDS, State, Table, after_error

# An attribute of an enum takes Python 3.11 as long as a call.
_IDLE, _WAITING, _CLOSED = State.IDLE, State.WAITING, State.CLOSED

DriverEvent = Welcome | Reply | ErrorReply | Pong | Working | Goodbye
NodeEvent = Hello | Dispatch | Ping | Goodbye
E = TypeVar("E", DriverEvent, NodeEvent)

_NOTHING = memoryview(b"")
_DISPATCH, _REPLY = Kind.DISPATCH, Kind.REPLY


@dataclass(frozen=True, slots=True)
class _Limits:
    """What the peer said it takes: nothing but a greeting, until it has said so."""

    max_rows: int
    max_payload: int
    dtypes: tuple[WireDType, ...]


class _Form(NamedTuple):
    """How a layer's rows travel: `hidden` values in `columns` elements of the dtype's raw form."""

    hidden: int
    columns: int
    row_bytes: int


class _Owed(NamedTuple):
    """A dispatch or ping that the driver has no answer to.

    reply: the header of the REPLY that is due, but for its crc32; head: the same as bytes; shape:
    that of its values.
    """

    sequence: int
    reply: Header | None = None
    head: bytes = b""
    shape: tuple[int, int] = (0, 0)


class _Request(NamedTuple):
    """A dispatch or ping that the node has not answered; shape: that of the reply's values."""

    header: Header
    shape: tuple[int, int] = (0, 0)


Q = TypeVar("Q", _Owed, _Request)


class _Connection(Generic[E, Q]):
    """What both ends share: feeding, order, closing."""

    def __init__(
        self, sends: Table, receives: Table, hidden: Callable[[int], int], crc32: Checksum
    ) -> None:
        self._sends, self._receives = sends, receives
        self._hidden, self._crc32 = hidden, crc32
        self._sequence = 0
        self._forms: dict[tuple[int, WireDType], _Form] = {}
        #: What is not answered yet, the oldest first.
        self._open: deque[Q] = deque()
        self._state = State.FRESH
        self._header: Header | None = None
        #: The crc32 that the header states, and that of its own bytes.
        self._crc = self._running = 0
        #: Bytes that `feed` takes next; 0 once nothing more can come.
        self.needs = HEADER_SIZE

    @property
    def state(self) -> State:
        """Where the link stands."""
        return self._state

    @property
    def sequence(self) -> int:
        """The sequence number of the last dispatch or ping."""
        return self._sequence

    def skip_to(self, sequence: int) -> None:
        """Go on after `sequence`: what came up to it was asked and answered by other hands."""
        if self._state is not _IDLE:
            raise LocalProtocolError(f"the link is {self._state.name.lower()} and cannot skip")
        self._sequence = sequence

    @property
    def outstanding(self) -> int:
        """How many dispatches and pings are not answered yet, as far as this end knows."""
        return len(self._open)

    @property
    def closed(self) -> bool:
        """Whether nothing more will come, and at most a refusal may go."""
        return self._state >= State.CLOSED

    def feed(self, data: memoryview | bytes) -> E | None:
        """The event that these `needs` bytes complete; None when a payload follows the header.

        Raises RemoteProtocolError for what the peer may not send, and LocalProtocolError for
        another number of bytes or a link that is closed.
        """
        if len(data) != self.needs or self._state >= _CLOSED:
            raise LocalProtocolError(f"{len(data)} bytes fed, {self.needs} needed")
        try:
            header = self._header
            if header is None:
                header = self._accept(data)
                if header.length:
                    return None
                data = _NOTHING
            return self._complete(header, data)
        except RemoteProtocolError:
            self._move(State.FAILED)
            raise

    def _accept(self, data: memoryview | bytes) -> Header:
        """Check a header before its payload is asked for."""
        header = decode_header(data)
        if header.kind not in self._receives[self._state]:
            problem = f"a {header.kind.name} came while the link was {self._state.name.lower()}"
            raise RemoteProtocolError(problem)
        self._check(header)
        self._header, self._crc = header, header.crc
        self._running = self._crc32(data[:SUMMED_SIZE], 0)
        self.needs = header.length
        return header

    def _complete(self, header: Header, payload: memoryview | bytes) -> E:
        if self._crc32(payload, self._running) != self._crc:
            raise RemoteProtocolError(f"the checksum of a {header.kind.name} is wrong")
        event = self._decode(header, payload)
        self._header = None
        self.needs = HEADER_SIZE
        self._move(self._next(header, event))
        return event

    def _next(self, header: Header, event: E) -> State:
        """The state after `event`."""
        state = self._after(self._receives[self._state][header.kind])
        if type(event) is ErrorReply:
            return after_error(state, event.code, header.sequence)
        return state

    def _after(self, state: State) -> State:
        """The state that a cell of the tables means while dispatches may still be owed."""
        return _WAITING if state is _IDLE and self._open else state

    def _may_send(self, kind: Kind) -> State:
        """The state after sending `kind`. Raises LocalProtocolError if it may not go now."""
        state = self._sends[self._state].get(kind)
        if state is None:
            problem = f"a {kind.name} may not be sent while the link is {self._state.name.lower()}"
            raise LocalProtocolError(problem)
        return state

    def _move(self, state: State) -> None:
        self._state = state
        if state >= _CLOSED:
            self._header = None
            self.needs = 0

    def _form(self, layer: int, dtype: WireDType) -> _Form:
        """How rows of a layer travel as `dtype`; 0 for all when this model has no experts there."""
        form = self._forms.get((layer, dtype))
        if form is None:
            try:
                hidden = self._hidden(layer)
            except LookupError:
                hidden = 0
            if not 0 < hidden <= MAX_HIDDEN:
                return _Form(0, 0, 0)
            form = _Form(hidden, dtype.columns(hidden), dtype.row_bytes(hidden))
            self._forms[layer, dtype] = form
        return form

    def _check(self, header: Header) -> None:
        raise NotImplementedError

    def _decode(self, header: Header, payload: memoryview | bytes) -> E:
        raise NotImplementedError

    def goodbye(self, reason: str) -> list[Buffer]:
        """End the link, saying why."""
        state = self._may_send(Kind.GOODBYE)
        self._move(state)
        return encode_goodbye(Goodbye(reason))


class DriverConnection(_Connection[DriverEvent, _Owed]):
    """The driver's end: greets, then has a few dispatches or one ping outstanding at a time.

    hidden: the row length of a layer; LookupError or 0 for a layer without experts. crc32: zlib's,
    or one that is faster.
    """

    def __init__(self, hidden: Callable[[int], int], crc32: Checksum = crc32) -> None:
        super().__init__(DRIVER_SENDS, NODE_SENDS, hidden, crc32)
        self._max_reply = MAX_PAYLOAD
        self._limits = _Limits(0, 0, ())
        #: The latest epoch that the node has named, in its WELCOME, a REPLY or a PONG.
        self.epoch = 0

    def hello(self, hello: Hello) -> list[Buffer]:
        """The first frame."""
        state = self._may_send(Kind.HELLO)
        frame = encode_frame(Kind.HELLO, (encode_hello(hello),))
        self._max_reply = min(hello.max_payload, MAX_PAYLOAD)
        self._move(state)
        return frame

    def dispatch(self, dispatch: Dispatch) -> list[Buffer]:
        """Ask for one layer's rows. Its arrays must not change until the buffers are sent."""
        state = self._may_send(_DISPATCH)
        if len(self._open) >= MAX_OUTSTANDING:
            raise LocalProtocolError(f"{MAX_OUTSTANDING} dispatches are outstanding, the limit")
        sequence = _following(self._sequence)
        frame = encode_dispatch(dispatch, sequence, self._crc32)
        owed = self._owe(dispatch, sequence)
        self._sequence = sequence
        self._open.append(owed)
        self._move(state)
        return frame

    def _owe(self, dispatch: Dispatch, sequence: int) -> _Owed:
        """What is due for it, if neither end would refuse this dispatch for its size."""
        layer, dtype, mode, limits = dispatch.layer, dispatch.dtype, dispatch.mode, self._limits
        (rows, columns), pairs = dispatch.rows.shape, len(dispatch.ids)
        form = self._form(layer, dtype)
        if columns != form.columns:
            shape = f"{columns} columns of {dtype.label}"
            raise LocalProtocolError(f"layer {layer} has no rows of {shape}")
        count = pairs if mode else rows
        asked, answered = (
            asked_bytes(rows, pairs, form.row_bytes),
            TIMES_SIZE + count * form.row_bytes,
        )
        if rows > limits.max_rows or asked > limits.max_payload or answered > self._max_reply:
            problem = f"{rows} rows, {asked} bytes out and {answered} back are too many"
            raise LocalProtocolError(f"{problem}; rows_that_fit says how many are not")
        if dtype not in limits.dtypes:
            raise LocalProtocolError(f"the node does not take rows as {dtype.label}")
        fields = (_REPLY, 0, sequence, dispatch.epoch, layer, dtype, mode, rows, answered)
        reply = Header(VERSION, *fields, 0)
        return _Owed(sequence, reply, encode_head(*fields), (count, columns))

    def ping(self) -> list[Buffer]:
        """Ask whether the node is there."""
        state = self._may_send(Kind.PING)
        self._sequence = _following(self._sequence)
        self._open.append(_Owed(self._sequence))
        self._move(state)
        return encode_ping(self._sequence)

    def refuse(self, error: RemoteProtocolError) -> list[Buffer]:
        """What may still be sent after `feed` raised `error`: a GOODBYE that says so."""
        return self.goodbye(str(error))

    def _accept(self, data: memoryview | bytes) -> Header:
        # What is due to the last byte needs no check of its fields.
        if self._open:
            _, header, head, _ = self._open[0]
            if header is not None and data[:SUMMED_SIZE] == head:
                self._header = header
                self._crc, self._running = crc_of(data), self._crc32(head, 0)
                self.needs = header.length
                return header
        return super()._accept(data)

    def _check(self, header: Header) -> None:
        if header.kind is Kind.PING and not header.flags:
            raise RemoteProtocolError("a node answers a PING and never sends one")
        answers = self._open and header.kind is not Kind.GOODBYE
        awaited = self._open[0].sequence if answers else 0
        about_link = header.kind is Kind.ERROR and not header.sequence
        if header.sequence != awaited and not about_link:
            problem = f"a {header.kind.name} answers {header.sequence}; {awaited} is the next due"
            raise RemoteProtocolError(problem)
        if header.kind is Kind.REPLY:
            self._check_reply(header)

    def _check_reply(self, header: Header) -> None:
        due = self._open[0].reply
        assert due is not None
        if header[5:9] != due[5:9] or header.epoch < due.epoch:  # layer, dtype, mode, rows
            raise RemoteProtocolError("a REPLY differs from its DISPATCH in what it must repeat")
        if header.length != due.length:
            problem = f"a REPLY of {header.length} bytes where {due.length} are due"
            raise RemoteProtocolError(problem)
        # Later than the dispatch's, it is the node's own.
        self.epoch = max(self.epoch, header.epoch)

    def _decode(self, header: Header, payload: memoryview | bytes) -> DriverEvent:
        match header.kind:
            case Kind.REPLY:
                return reply_in(payload, header.mode, header.dtype, self._open.popleft().shape)
            case Kind.WORKING:
                return Working()
            case Kind.WELCOME:
                welcome = decode_welcome(payload)
                self.epoch = welcome.epoch
                self._limits = _Limits(welcome.max_rows, welcome.max_payload, welcome.dtypes)
                return welcome
            case Kind.ERROR:
                error = decode_error(header, payload)
                if header.sequence:
                    self._open.popleft()
                return error
            case Kind.PING:
                self._open.popleft()
                self.epoch = max(self.epoch, header.epoch)
                return Pong()
            case _:
                return decode_goodbye(payload)


class NodeConnection(_Connection[NodeEvent, _Request]):
    """The node's end: answers, and speaks unasked only to end the link.

    hidden: the row length of a layer; LookupError or 0 for a layer without experts. crc32: zlib's,
    or one that is faster.
    """

    def __init__(self, hidden: Callable[[int], int], crc32: Checksum = crc32) -> None:
        super().__init__(NODE_SENDS, DRIVER_SENDS, hidden, crc32)
        self._pairs = 0
        self._max_reply = MAX_PAYLOAD
        self._limits = _Limits(MAX_ROWS, MAX_PAYLOAD, ())
        #: The node's own, which REPLY and PONG carry. May be set by any thread.
        self.epoch = 0

    def welcome(self, welcome: Welcome) -> list[Buffer]:
        """Accept the HELLO. `welcome`'s limits hold from here on."""
        state = self._may_send(Kind.WELCOME)
        frame = encode_frame(Kind.WELCOME, (encode_welcome(welcome),))
        self._limits = _Limits(welcome.max_rows, welcome.max_payload, welcome.dtypes)
        self._move(state)
        return frame

    def reply(self, reply: Reply) -> list[Buffer]:
        """Answer the oldest dispatch. `reply.data` must not change until the buffers are sent."""
        state = self._may_send(_REPLY)
        request, shape = self._open[0]
        due = (request.mode, request.dtype, shape)
        if (reply.mode, reply.dtype, reply.data.shape) != due:
            given = (reply.mode, reply.dtype, reply.data.shape)
            raise LocalProtocolError(f"a reply of {given} where {due} is due")
        frame = encode_reply(reply, request, self._crc32, self.epoch)
        self._open.popleft()
        self._move(self._after(state))
        return frame

    def error(self, code: ErrorCode, message: str) -> list[Buffer]:
        """Refuse the oldest dispatch; without one, refuse the link and close it.

        PROTOCOL, VERSION and TOO_LARGE close it in any case.
        """
        state = self._may_send(Kind.ERROR)
        sequence = 0
        if self._state is State.WAITING:
            sequence = self._open.popleft().header.sequence
        self._move(after_error(self._after(state), code, sequence))
        return encode_error(ErrorReply(code, message), sequence)

    def working(self) -> list[Buffer]:
        """Say that the oldest dispatch is still computed."""
        self._may_send(Kind.WORKING)
        return encode_working(self._open[0].header.sequence)

    def pong(self) -> list[Buffer]:
        """Answer a Ping."""
        self._move(self._may_send(Kind.PING))
        return encode_pong(self._open.popleft().header.sequence, self.epoch)

    def refuse(self, error: RemoteProtocolError) -> list[Buffer]:
        """What may still be sent after `feed` raised `error`: an ERROR with its code."""
        return self.error(ErrorCode(error.code), str(error))

    def _check(self, header: Header) -> None:
        if header.flags and header.kind is Kind.PING:
            raise RemoteProtocolError("a driver sends a PING and never answers one")
        kind = header.kind
        due = _following(self._sequence) if kind is _DISPATCH or kind is Kind.PING else 0
        if header.sequence != due:
            problem = f"a {header.kind.name} has sequence {header.sequence} where {due} is due"
            raise RemoteProtocolError(problem)
        if kind is _DISPATCH:
            if len(self._open) >= MAX_OUTSTANDING:
                raise RemoteProtocolError(f"more than {MAX_OUTSTANDING} dispatches are outstanding")
            self._check_dispatch(header)

    def _check_dispatch(self, header: Header) -> None:
        limits = self._limits
        if header.rows > limits.max_rows or header.length > limits.max_payload:
            problem = f"{header.rows} rows in {header.length} bytes are more than this node takes"
            raise RemoteProtocolError(problem, ErrorCode.TOO_LARGE)
        if header.dtype not in limits.dtypes:
            raise RemoteProtocolError(f"this node does not take rows as {header.dtype.label}")
        form = self._form(header.layer, header.dtype)
        if not form.hidden:
            raise RemoteProtocolError(f"this model has no experts in layer {header.layer}")
        pairs = pairs_in(header, form.row_bytes, form.hidden)
        size = TIMES_SIZE + (pairs if header.mode else header.rows) * form.row_bytes
        if size > self._max_reply:
            problem = f"the reply to {pairs} pairs would be {size} bytes"
            raise RemoteProtocolError(problem, ErrorCode.TOO_LARGE)
        self._pairs = pairs

    def _decode(self, header: Header, payload: memoryview | bytes) -> NodeEvent:
        match header.kind:
            case Kind.DISPATCH:
                columns, pairs = self._form(header.layer, header.dtype).columns, self._pairs
                dispatch = dispatch_in(header, payload, columns, pairs)
                self._sequence = header.sequence
                shape = (pairs if header.mode else header.rows, columns)
                self._open.append(_Request(header, shape))
                return dispatch
            case Kind.PING:
                self._sequence = header.sequence
                self._open.append(_Request(header))
                return Ping()
            case Kind.HELLO:
                hello = decode_hello(payload)
                self._max_reply = min(hello.max_payload, MAX_PAYLOAD)
                return hello
            case _:
                return decode_goodbye(payload)


def _following(sequence: int) -> int:
    """The next sequence number: 1, 2, ... 2**32 - 1, 1. 0 means "no request"."""
    return sequence % MAX_U32 + 1

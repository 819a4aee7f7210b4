"""Frames over a blocking socket: the shell around a sans-I/O connection, for the token loop.

One system call for a header, one for a payload, one to send a frame; the kernel keeps the time.
No byte beyond a frame is read before the next `receive`, so that poll() tells the truth.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from time import monotonic
from typing import Generic, Protocol, TypeVar

import numpy as np

from expert_network.errors import (
    Cancelled,
    ExpertNetworkError,
    LocalProtocolError,
    NodeClosed,
    NodeTimeout,
    RemoteProtocolError,
)
from expert_network.net.opening import open_link, prepare

__all__ = ["Buffer", "Connection", "FrameStream", "open_link"]

#: Seconds for the peer to take a frame off our hands.
SEND_TIMEOUT = 5.0
#: Bytes a second that a link must carry: a frame over FIRST_BUFFER has this much longer.
SLOWEST = 1 << 20
#: Seconds to take what is there when the silence was over before anyone looked.
LATE_LOOK = 0.1
#: The receive buffer a stream starts with: the payload of a batch-1 dispatch of any model.
FIRST_BUFFER = 64 << 10
#: A buffer that one large frame made larger than this is given back after it.
KEPT_BUFFER = 2 << 20
#: Seconds, of those it lingers, that an interrupted stream leaves its peer for its last frame.
PARTING = 0.2
#: What a peer may still send while its link is ended politely.
MAX_LINGER = 1 << 20

Buffer = bytes | memoryview
E_co = TypeVar("E_co", covariant=True)
E = TypeVar("E")

_TIMEVAL = struct.Struct("@ll")


class Connection(Protocol[E_co]):
    """The sans-I/O end of a link, as expert_protocol.connection has it."""

    @property
    def needs(self) -> int:
        """Bytes wanted next, bounded; 0 when nothing more can come."""

    def feed(self, data: memoryview, /) -> E_co | None:
        """The event that these bytes complete. Raises RemoteProtocolError."""

    def refuse(self, error: RemoteProtocolError, /) -> Sequence[Buffer]:
        """What to say last after `error`."""


class FrameStream(Generic[E]):
    """One link's socket, which it owns from now on.

    After any error but Cancelled, an interrupt included, nobody knows where in a frame the socket
    stands: it is closed, and whoever uses the stream afterwards meets the error that closed it, or
    LocalProtocolError if it was closed on purpose. One thread may receive while another sends;
    `interrupt` and `close` may be called from any thread.

    peer: the node's name or URL, or the driver's address, for sentences.
    linger: seconds to let the peer read a refusal before the socket is closed.
    """

    def __init__(
        self,
        sock: socket.socket,
        connection: Connection[E],
        peer: str,
        *,
        linger: float = 0.0,
    ) -> None:
        self.peer = peer
        self.bytes_sent = 0
        self.bytes_received = 0
        self._sock, self._connection = sock, connection
        self._linger = linger
        self._closed = self._interrupted = False
        self._end: ExpertNetworkError | None = None
        self._header = memoryview(bytearray(32))
        self._buffer = _memory(FIRST_BUFFER)
        self._receive_timeout = self._send_timeout = -1.0
        #: When the last whole frame went or came: silence counts from here.
        self._last = self._deadline = monotonic()
        sock.settimeout(None)
        prepare(sock)

    @property
    def closed(self) -> bool:
        """Whether this stream is of no more use."""
        return self._closed

    def fileno(self) -> int:
        """For poll: readable when `receive` has something to read. -1 once closed."""
        return self._sock.fileno()

    def send(self, buffers: Sequence[Buffer], timeout: float = SEND_TIMEOUT) -> None:
        """Send one frame's buffers, uncopied, within `timeout` seconds.

        A large frame has longer, as SLOWEST says, as long as some of it is taken meanwhile.

        Raises NodeTimeout if the peer does not take them, NodeClosed if it is gone.
        """
        self._usable()
        try:
            self._send(buffers, timeout)
        except BaseException as error:
            self._fail(error)
            raise
        self._last = monotonic()

    def receive(self, silence: float, frame: float | None = None) -> E:
        """The next event; its arrays hold until the next call.

        Raises NodeTimeout if no whole frame comes within `silence` seconds after the last whole
        frame that came or went, however many bytes drip in meanwhile; and, if `frame` is given,
        when one that has begun is not complete that many seconds later. A large frame has longer,
        as SLOWEST says, as long as some of it comes every `silence` seconds. Raises NodeClosed at
        the end of the stream, RemoteProtocolError after sending the connection's refusal, and
        Cancelled after `interrupt`, which leaves the stream usable for sending.
        """
        self._usable()
        try:
            event = self._next_event(silence, frame)
        except Cancelled:
            raise
        except RemoteProtocolError as error:
            self._refuse(error)
            raise
        except BaseException as error:
            self._fail(error)
            raise
        self._last = monotonic()
        return event

    def interrupt(self) -> None:
        """Make `receive` raise Cancelled between two frames, now or when it is next called."""
        self._interrupted = True
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)

    def finish(self, buffers: Sequence[Buffer] = (), timeout: float = SEND_TIMEOUT) -> None:
        """Send the last frame, let the peer read it for `linger` seconds, and close. No errors."""
        if self._closed:
            return
        try:
            self._send(buffers, timeout)
            if self._interrupted:
                self._outlast(min(self._linger, PARTING))
            else:
                self._sock.shutdown(socket.SHUT_WR)
            # Closing with bytes unread resets the connection, and the last frame would be lost.
            self._discard(monotonic() + self._linger)
        except (OSError, ExpertNetworkError):
            pass
        finally:
            self.close()

    def close(self, error: ExpertNetworkError | None = None) -> None:
        """Close the socket at once; `error` is for who uses it afterwards, in another thread.

        Closing again does nothing.
        """
        if not self._closed:
            if error is not None:
                # Without its traceback, whose frames hold this stream and what it was to send.
                self._end = copy(error)
            self._closed = True
            with suppress(OSError):  # wakes a thread that is receiving
                self._sock.shutdown(socket.SHUT_RDWR)
            self._sock.close()
            self._buffer = _memory(0)

    def _usable(self) -> None:
        if self._closed:
            if self._end is not None:
                raise copy(self._end)
            raise LocalProtocolError(f"the link to {self.peer} is closed and was used again")

    def _fail(self, error: BaseException) -> None:
        self.close(error if isinstance(error, ExpertNetworkError) else None)

    # Sending

    def _send(self, buffers: Sequence[Buffer], timeout: float) -> None:
        size = 0
        for part in buffers:
            size += part.nbytes if isinstance(part, memoryview) else len(part)
        if not size:
            return
        deadline = monotonic() + timeout + size / SLOWEST
        # A large frame goes in several calls: one that takes nothing, after one that took a part.
        patience = timeout if size <= FIRST_BUFFER else timeout / 2
        if patience != self._send_timeout:
            self._set_timeout(socket.SO_SNDTIMEO, patience)
            self._send_timeout = patience
        try:
            sent = self._sock.sendmsg(buffers)
            if sent != size:
                self._send_rest(buffers, sent, deadline)
        except (BlockingIOError, TimeoutError):
            raise self._not_taken(timeout) from None
        except OSError as error:
            raise self._gone(error) from error
        self.bytes_sent += size

    def _send_rest(self, buffers: Sequence[Buffer], sent: int, deadline: float) -> None:
        left = [memoryview(part).cast("B") for part in buffers]
        while True:
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if not left:
                return
            left[0] = left[0][sent:]
            if monotonic() >= deadline:
                raise TimeoutError
            sent = self._sock.sendmsg(left)

    # Receiving

    def _next_event(self, silence: float, frame: float | None) -> E:
        # What has come by now came in time, however late we look: there is time to take it.
        self._deadline = max(self._last + silence, monotonic() + LATE_LOOK)
        connection = self._connection
        begun = False
        while True:
            needs = connection.needs
            if not needs:
                raise LocalProtocolError(f"the link to {self.peer} has ended and was read again")
            view = self._room(needs, begun)
            self._fill(view, silence, frame, begun)
            event = connection.feed(view)
            if event is not None:
                return event
            begun = True

    def _room(self, needs: int, payload: bool) -> memoryview:
        if not payload:
            if needs != len(self._header):
                self._header = memoryview(bytearray(needs))
            return self._header
        size = len(self._buffer)
        if needs > size or (size > KEPT_BUFFER and needs <= KEPT_BUFFER):
            # Views of the old buffer keep it alive; we no longer do.
            self._buffer = _memory(max(needs, FIRST_BUFFER))
        return self._buffer[:needs]

    def _fill(self, view: memoryview, silence: float, frame: float | None, begun: bool) -> None:
        got, size = 0, len(view)
        large = size > FIRST_BUFFER
        stalled = self._deadline
        if large:
            self._deadline += size / SLOWEST
        while got < size:
            left = min(self._deadline, stalled) - monotonic()
            if left <= 0:
                raise self._silent(silence, begun)
            self._wait_at_most(left, silence)
            count = self._take(view[got:] if got else view, begun)
            if not count:
                continue
            got += count
            if large:
                stalled = monotonic() + silence
            if not begun:
                begun = True
                if frame is not None:
                    self._deadline = min(self._deadline, monotonic() + frame)

    def _take(self, view: memoryview, begun: bool) -> int:
        """How many bytes came; 0 if none did before the kernel's timeout."""
        try:
            count = self._sock.recv_into(view)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._gone(error) from error
        if not count:
            raise self._ended(begun)
        self.bytes_received += count
        return count

    def _wait_at_most(self, left: float, silence: float) -> None:
        """Give the kernel a timeout of at most `left`: the same in most calls, so rarely set."""
        step = silence / 8
        wanted = left // step * step if step <= left < float("inf") else left
        if wanted != self._receive_timeout:
            self._set_timeout(socket.SO_RCVTIMEO, wanted)
            self._receive_timeout = wanted

    def _set_timeout(self, option: int, seconds: float) -> None:
        # 0 is "for ever" to the kernel.
        whole = 0 if seconds == float("inf") else max(1000, int(seconds * 1e6))
        try:
            self._sock.setsockopt(
                socket.SOL_SOCKET, option, _TIMEVAL.pack(*divmod(whole, 1_000_000))
            )
        except OSError as error:
            raise self._gone(error) from error

    def _refuse(self, error: RemoteProtocolError) -> None:
        self._end = copy(error)
        try:
            self.finish(self._connection.refuse(error))
        finally:
            self.close()

    def _outlast(self, seconds: float) -> None:
        """Wait until what the peer sent before it heard our last frame has come.

        A socket that is shut in both directions answers that with a reset, and one that is shut for
        reading does not tell when its peer closes: so some time has to do.
        """
        trouble = select.poll()
        trouble.register(self._sock, 0)
        trouble.poll(seconds * 1000)

    def _discard(self, deadline: float) -> None:
        scrap = bytearray(64 << 10)
        taken = 0
        while taken < MAX_LINGER and (left := deadline - monotonic()) > 0:
            self._sock.settimeout(left)
            count = self._sock.recv_into(scrap)
            if not count:
                return
            taken += count

    # Sentences

    def _silent(self, silence: float, inside: bool) -> NodeTimeout:
        problem = (
            f"was silent for {silence:g} s" if not inside else "did not finish a frame in time"
        )
        return NodeTimeout(self.peer, problem, "check that it runs and that its network is up")

    def _not_taken(self, timeout: float) -> NodeTimeout:
        advice = "check that it runs and that its network is up"
        return NodeTimeout(self.peer, f"took no bytes for {timeout:g} s", advice)

    def _ended(self, inside: bool) -> ExpertNetworkError:
        if self._interrupted and not inside:
            return Cancelled(f"the link to {self.peer} was interrupted")
        problem = "closed the link" + (" in the middle of a frame" if inside else "")
        return NodeClosed(self.peer, problem, "check that it still runs, and its log")

    def _gone(self, error: OSError) -> NodeClosed:
        reset = isinstance(error, (ConnectionResetError, BrokenPipeError))
        problem = "reset the link" if reset else f"lost the link ({error.strerror or error})"
        return NodeClosed(self.peer, problem, "check that it still runs, and its log")


def _memory(size: int) -> memoryview:
    # Unlike a bytearray, not touched before it is used: a large frame costs what has arrived of it.
    return np.empty(size, np.uint8).data

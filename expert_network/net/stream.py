"""Frames over a socket: the shell around a sans-I/O connection, for the token loop.

One system call to send a frame and one to read it. A node's thread waits in the kernel, which keeps
the time; a driver, who has several links, waits in poll() and then takes what has come.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from time import monotonic
from typing import Generic, Protocol, TypeVar

from expert_network.errors import (
    Cancelled,
    ExpertNetworkError,
    LocalProtocolError,
    NodeClosed,
    NodeTimeout,
    RemoteProtocolError,
)
from expert_network.net.inbox import FIRST_BUFFER, Inbox, Receiver
from expert_network.net.opening import open_link, prepare
from expert_network.net.patience import Patience

__all__ = ["Buffer", "Connection", "FrameStream", "open_link"]

#: Seconds for the peer to take a frame off our hands.
SEND_TIMEOUT = 5.0
#: Bytes a second that a link must carry: a frame over FIRST_BUFFER has this much longer.
SLOWEST = 1 << 20
#: Seconds to take what is there when the silence was over before anyone looked.
LATE_LOOK = 0.1
#: Seconds, of those it lingers, that an interrupted stream leaves its peer for its last frame.
PARTING = 0.2
#: What a peer may still send while its link is ended politely.
MAX_LINGER = 1 << 20

Buffer = bytes | memoryview
E_co = TypeVar("E_co", covariant=True)
E = TypeVar("E")

_TIMEVAL = struct.Struct("@ll")


class Connection(Receiver[E_co], Protocol[E_co]):
    """The sans-I/O end of a link, as expert_protocol.connection has it."""

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
        self._inbox = Inbox(connection)
        #: What of a frame that was pushed the kernel has not taken yet.
        self._unsent: list[memoryview] = []
        self._linger = linger
        self._closed = self._interrupted = False
        self._end: ExpertNetworkError | None = None
        self._receive_timeout = self._send_timeout = -1.0
        #: When the last whole frame went or came: silence counts from here.
        self._last = monotonic()
        #: When the first and the last bytes came of the frame that has begun.
        self._begun_at = self._came_at = self._last
        self._patience, self._poll = Patience(), select.poll()
        #: Whether `look` ever does.
        self.looks, self._polled = self._patience.looks, False
        sock.settimeout(None)
        prepare(sock)

    @property
    def closed(self) -> bool:
        """Whether this stream is of no more use."""
        return self._closed

    def fileno(self) -> int:
        """For poll: readable when `receive` has something to read. -1 once closed."""
        return self._sock.fileno()

    def send(self, buffers: Sequence[Buffer], timeout: float = SEND_TIMEOUT, sent: int = 0) -> None:
        """Send one frame's buffers, uncopied, within `timeout` seconds.

        A large frame has longer, as SLOWEST says, as long as some of it is taken meanwhile. `sent`
        bytes of it have gone by other hands.

        Raises NodeTimeout if the peer does not take them, NodeClosed if it is gone.
        """
        self._usable()
        try:
            self.bytes_sent += sent
            self._send(_after(sent, buffers) if sent else buffers, timeout)
        except BaseException as error:
            self._broken(error)
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
            event = self._inbox.next()
            if event is None:
                event = self._await(silence, frame)
        except BaseException as error:
            self._broken(error)
            raise
        self._last = monotonic()
        return event

    def push(self, buffers: Sequence[Buffer]) -> int:
        """Hand one frame to the kernel as far as it takes it now; its size in bytes.

        Its memory must not change while the stream is `pushing`. Raises NodeClosed.
        """
        if self._closed:
            self._usable()
        size = _size(buffers)
        sent = 0 if self._unsent else self._send_now(buffers)
        if sent != size:
            self._unsent += _after(sent, buffers)
        return size

    def push_on(self) -> bool:
        """Hand over more of what was pushed; True if nothing is left. Raises NodeClosed."""
        self._usable()
        if self._unsent:
            self._unsent = _after(self._send_now(self._unsent), self._unsent)
        return not self._unsent

    @property
    def pushing(self) -> bool:
        """Whether the kernel has not taken all that was pushed."""
        return bool(self._unsent)

    def look(self) -> None:
        """Look whether something comes, for as long as that has been of use."""
        if not self._polled:
            self._poll.register(self._sock, select.POLLIN)
            self._polled = True
        self._patience.look(self._poll)

    def wait_at_most(self, seconds: float) -> None:
        """Have the kernel wait no longer for what comes; for other hands that read."""
        if seconds != self._receive_timeout:
            self._set_timeout(socket.SO_RCVTIMEO, seconds)
            self._receive_timeout = seconds

    def room(self) -> memoryview:
        """Where other hands may put what comes next, to say then that it `came`."""
        return self._inbox.room()

    def take_over(self, count: int, last: float) -> None:
        """Take `count` bytes that other hands have put into `room`.

        They met all frames up to `last`, by monotonic(), and have counted their bytes.
        """
        self.bytes_received += count
        self._last = max(self._last, last)
        if count:
            self._begun_at = self._came_at = monotonic()
            self._inbox.came(count)

    def broken(self, sent: int, timeout: float) -> ExpertNetworkError:
        """Close after other hands could not send; why: `sent` bytes went, or -errno it was."""
        again = sent >= 0 or -sent in (errno.EAGAIN, errno.EWOULDBLOCK)
        gone = self._gone(OSError(-sent, os.strerror(-sent))) if not again else None
        error = gone or self._not_taken(timeout)
        self.close(error)
        return error

    def adopt(self, buffers: Sequence[Buffer], sent: int, came: memoryview, since: float) -> int:
        """Go on with a frame that other hands have begun to send; its size in bytes.

        `sent` bytes of it went at `since`, by monotonic(), and `came` has come.
        """
        self._usable()
        self._unsent += _after(sent, buffers)
        self._last = self._begun_at = since
        room = self._inbox.room()
        room[: len(came)] = came
        self._inbox.came(len(came))
        self.bytes_sent += sent
        self.bytes_received += len(came)
        return _size(buffers)

    def pull(self) -> None:
        """Take, in one read, what has come; poll must have said that something has.

        Raises NodeClosed at the end of the stream.
        """
        if self._closed:
            self._usable()
        try:
            self._take()
        except BaseException as error:
            self._broken(error)
            raise

    def next(self) -> E | None:
        """The next event of what `pull` took; its arrays hold until `next` or `pull` is called.

        Raises RemoteProtocolError after sending the connection's refusal.
        """
        try:
            event = self._inbox.next()
        except BaseException as error:
            self._broken(error)
            raise
        if event is not None:
            self._last = monotonic()
        return event

    def late_at(self, silence: float, looked: float, frame: float | None = None) -> float:
        """When, by monotonic(), the peer is late, as `receive` says, unless more comes.

        What had come when somebody `looked` came in time, however late that was: there is LATE_LOOK
        to take it.
        """
        due = max(self._last + silence, looked + LATE_LOOK)
        if not self._inbox.begun:
            return due
        large = self._inbox.large
        if large:
            due = min(due + large / SLOWEST, max(due, self._came_at + silence))
        if frame is not None:
            due = min(due, self._begun_at + frame + large / SLOWEST)
        return due

    @property
    def quiet(self) -> bool:
        """Whether it is open, nothing is left to send, and nothing has been read ahead."""
        return not (self._closed or self._unsent or self._inbox.begun)

    @property
    def idle(self) -> bool:
        """Whether nothing has been read that is not yet an event."""
        return not self._inbox.begun

    @property
    def bytes_taken(self) -> int:
        """Bytes of the frames that became events."""
        return self._inbox.taken

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
            self._unsent = []

    def _usable(self) -> None:
        if self._closed:
            if self._end is not None:
                raise copy(self._end)
            raise LocalProtocolError(f"the link to {self.peer} is closed and was used again")

    def _broken(self, error: BaseException) -> None:
        """Close after any error but Cancelled, after saying why if it is the peer's."""
        if isinstance(error, RemoteProtocolError):
            self._refuse(error)
        elif not isinstance(error, Cancelled):
            self.close(error if isinstance(error, ExpertNetworkError) else None)

    # Sending

    def _send(self, buffers: Sequence[Buffer], timeout: float) -> None:
        size = _size(buffers)
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
        left = _after(sent, buffers)
        while left:
            if monotonic() >= deadline:
                raise TimeoutError
            left = _after(self._sock.sendmsg(left), left)

    def _send_now(self, buffers: Sequence[Buffer]) -> int:
        """How many bytes the kernel takes without waiting."""
        try:
            sent = self._sock.sendmsg(buffers, (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            gone = self._gone(error)
            self.close(gone)
            raise gone from error
        except BaseException:
            self.close()
            raise
        self.bytes_sent += sent
        self._last = monotonic()
        return sent

    # Receiving

    def _await(self, silence: float, frame: float | None) -> E:
        """Read until there is an event."""
        if self.looks:
            self.look()
        now = looked = monotonic()
        while self._connection.needs:
            left = self.late_at(silence, looked, frame) - now
            if left <= 0:
                raise self._silent(silence)
            self._wait_at_most(left, silence)
            if self._take():
                event = self._inbox.next()
                if event is not None:
                    return event
            now = monotonic()
        raise LocalProtocolError(f"the link to {self.peer} has ended and was read again")

    def _take(self) -> bool:
        """Read what there is; False if nothing came before the kernel's timeout."""
        inbox = self._inbox
        begun = inbox.begun
        try:
            count = self._sock.recv_into(inbox.room())
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._gone(error) from error
        if not count:
            raise self._ended(begun)
        inbox.came(count)
        self.bytes_received += count
        self._came_at = monotonic()
        if not begun:
            self._begun_at = self._came_at
        return True

    def _wait_at_most(self, left: float, silence: float) -> None:
        """Give the kernel a timeout of at most `left`: the same in most calls, so rarely set."""
        step = silence / 8
        self.wait_at_most(left // step * step if step <= left < float("inf") else left)

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

    def _silent(self, silence: float) -> NodeTimeout:
        problem = f"was silent for {silence:g} s"
        if self._inbox.begun:
            problem = "did not finish a frame in time"
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


def _size(buffers: Sequence[Buffer]) -> int:
    size = 0
    for part in buffers:
        size += part.nbytes if type(part) is memoryview else len(part)
    return size


def _after(sent: int, buffers: Sequence[Buffer]) -> list[memoryview]:
    """What is left of `buffers` after their first `sent` bytes."""
    left = [memoryview(part).cast("B") for part in buffers]
    while left and sent >= len(left[0]):
        sent -= len(left.pop(0))
    if left and sent:
        left[0] = left[0][sent:]
    return left

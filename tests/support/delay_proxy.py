"""A TCP proxy that delivers every byte a fixed time after it came, in both directions.

    with delayed(0.005, [node.port, ...]) as ports: ...  # ports of 127.0.0.1, in the same order

It is a process of its own with a single thread, so that it takes no interpreter lock of anyone it
stands between. Bytes are stamped when they arrive: a delay adds latency and limits no bandwidth.
"""

from __future__ import annotations

import argparse
import select
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from time import perf_counter

_PIECE = 1 << 18  # bytes of one read


class _Way:
    """One direction of one connection: what came from `source` and is due at `target`."""

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self.source, self.target = source, target
        self.waiting: deque[tuple[float, memoryview]] = deque()
        self.ended = self.blocked = False

    def read(self, due: float) -> None:
        """Take what is there; nothing stands for the end, which is delayed like bytes."""
        try:
            data = self.source.recv(_PIECE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.ended = not data
        self.waiting.append((due, memoryview(data)))

    def write(self, now: float) -> None:
        """Hand on what is due, as far as the target takes it."""
        self.blocked = False
        while self.waiting and self.waiting[0][0] <= now:
            due, data = self.waiting[0]
            try:
                sent = self.target.send(data) if data else self._end()
            except BlockingIOError:
                self.blocked = True
                return
            except OSError:
                self.waiting.clear()
                return
            if sent == len(data):
                self.waiting.popleft()
            else:
                self.waiting[0] = (due, data[sent:])

    def _end(self) -> int:
        self.target.shutdown(socket.SHUT_WR)
        return 0

    @property
    def over(self) -> bool:
        return self.ended and not self.waiting


class Proxy:
    """Listens on a free port for each of `targets`, ports of 127.0.0.1; `run` never returns."""

    def __init__(self, delay_s: float, targets: Sequence[int]) -> None:
        self._delay = delay_s
        self._listeners = {socket.create_server(("127.0.0.1", 0)): port for port in targets}
        self._ways: list[_Way] = []

    @property
    def ports(self) -> list[int]:
        """Where it listens, in the order of the targets."""
        return [int(listener.getsockname()[1]) for listener in self._listeners]

    def run(self) -> None:
        while True:
            self._step()

    def _step(self) -> None:
        readers = {way.source: way for way in self._ways if not way.ended}
        writers = {way.target: way for way in self._ways if way.blocked}
        # select, since poll and epoll count their time-outs in whole milliseconds here.
        ready, free, _ = select.select([*self._listeners, *readers], [*writers], [], self._wait())
        now = perf_counter()
        for sock in ready:
            if sock in readers:
                readers[sock].read(now + self._delay)
            else:
                self._accept(sock)
        for way in self._ways:
            if not way.blocked or way.target in free:
                way.write(now)
        self._drop_finished()

    def _wait(self) -> float | None:
        """Seconds until the next byte is due; None if none is on its way."""
        due = [way.waiting[0][0] for way in self._ways if way.waiting and not way.blocked]
        return max(0.0, min(due) - perf_counter()) if due else None

    def _accept(self, listener: socket.socket) -> None:
        near, _ = listener.accept()
        try:
            far = socket.create_connection(("127.0.0.1", self._listeners[listener]))
        except OSError:
            near.close()
            return
        for sock in (near, far):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ways += [_Way(near, far), _Way(far, near)]

    def _drop_finished(self) -> None:
        """Close connections of which both directions are over; they stand side by side."""
        pairs = zip(self._ways[::2], self._ways[1::2], strict=True)
        kept = []
        for one, other in pairs:
            if one.over and other.over:
                one.source.close()
                other.source.close()
            else:
                kept += [one, other]
        self._ways = kept


@contextmanager
def delayed(delay_s: float, targets: Sequence[int]) -> Iterator[list[int]]:
    """Ports behind which `targets` answer `delay_s` later each way; the proxy ends with the block.

    A TCP connection is made at once: it is the bytes that take their time.
    """
    command = [sys.executable, "-m", "tests.support.delay_proxy", str(delay_s)]
    process = subprocess.Popen(
        [*command, *map(str, targets)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield [int(port) for port in process.stdout.readline().split()]
    finally:
        process.kill()
        process.communicate()


def main() -> None:
    """The command line of this file: prints its ports once it listens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("delay_s", type=float)
    parser.add_argument("targets", type=int, nargs="+")
    options = parser.parse_args()
    proxy = Proxy(options.delay_s, options.targets)
    print(*proxy.ports, flush=True)
    with suppress(KeyboardInterrupt):
        proxy.run()


if __name__ == "__main__":
    main()

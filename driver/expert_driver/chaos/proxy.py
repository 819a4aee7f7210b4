"""A TCP proxy between a driver and its nodes, which harms their connections at exact points.

    with FaultProxy({"a": ("127.0.0.1", 8301)}, last_layer=7) as proxy:
        proxy.plan(Planned(Cut(), Point(token=40, layer=5)))
        ... a driver over proxy.urls() ...
        proxy.fired

One thread serves all nodes, so the order in which it sees frames is the order in which they came,
and a fault strikes between two bytes. Bytes are stamped when they arrive: a delay limits no
bandwidth.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from errno import EINPROGRESS
from random import Random
from threading import Condition, Thread
from time import perf_counter
from types import TracebackType
from typing import Any

from expert_driver.chaos.faults import (
    Call,
    Cut,
    Fault,
    Fired,
    HalfOpen,
    Heal,
    Planned,
    Point,
    Way,
)
from expert_driver.chaos.following import Follower, TokenClock
from expert_driver.chaos.lane import Lane
from expert_network.net.address import format_url
from expert_network.net.answers import name_unknown

#: A TCP socket that is closed so resets its connection.
_RESET = struct.pack("ii", 1, 0)
_JOIN_S = 5.0
HOST = "127.0.0.1"


class Connection:
    """A driver's connection to a node: two sockets, two lanes."""

    def __init__(self, node: str, near: socket.socket, far: socket.socket, random: Random) -> None:
        self.node, self.near, self.far = node, near, far
        self.to_node = Lane(near, far, random)
        self.to_driver = Lane(far, near, random)
        self.follower = Follower()
        self.closed = False
        # `far` is being connected.
        self.to_node.blocked = True

    @property
    def lanes(self) -> tuple[Lane, Lane]:
        return self.to_node, self.to_driver

    def suffer(self, fault: Fault) -> None:
        """Have `fault` strike now."""
        match fault:
            case Cut(reset):
                self.cut(reset)
            case Heal():
                self.heal()
            case Call(action):
                action()
            case _:
                for way, lane in zip((Way.TO_NODE, Way.TO_DRIVER), self.lanes, strict=True):
                    if way in fault.way:
                        lane.suffer(fault)

    def cut(self, reset: bool) -> None:
        """End it: with a reset, or as if both sides had said that they are done."""
        if reset:
            for sock in (self.near, self.far):
                with suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.close()
            return
        for lane in self.lanes:
            with suppress(OSError):
                lane.target.shutdown(socket.SHUT_WR)
            lane.suffer(HalfOpen())

    def heal(self) -> None:
        """Have it work again; if it cannot, since bytes were lost, reset it."""
        if any(lane.silent for lane in self.lanes):
            self.cut(reset=True)
        for lane in self.lanes:
            lane.heal()

    @property
    def finished(self) -> bool:
        """Whether both sides are done, or one of them with a connection that lost bytes."""
        lanes = self.lanes
        if any(lane.silent for lane in lanes):
            return any(lane.ended for lane in lanes)
        return all(lane.over for lane in lanes)

    def close(self) -> None:
        """Close both sockets."""
        self.closed = True
        self.near.close()
        self.far.close()


class FaultProxy:
    """Listens on a free port of this machine for each of `nodes`, which are names and addresses.

    `last_layer` is the model's last MoE layer (see `TokenClock`); without it no point is known.
    `seed` decides about jitter. Entering it starts its thread, leaving it ends all connections.
    Raises NodeUnreachable for a host whose name is not known.
    """

    def __init__(
        self,
        nodes: Mapping[str, tuple[str, int]],
        last_layer: int | None = None,
        seed: int = 0,
    ) -> None:
        self._addresses = {name: _resolved(*address) for name, address in nodes.items()}
        self._listeners = {_listener(): name for name in nodes}
        self._clock = None if last_layer is None else TokenClock(last_layer)
        self._random = Random(seed)
        self._connections: list[Connection] = []
        self._planned: list[Planned] = []
        self._lasting: list[tuple[str, Fault]] = []
        self._fired: list[Fired] = []
        # Guards what the thread and its user share, and tells of faults that fired.
        self._changed = Condition()
        self._orders: list[Callable[[], None]] = []
        self._wake, self._woken = socket.socketpair()
        self._stopped = False
        self._thread = Thread(target=self.run, name="fault-proxy", daemon=True)

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._order(self._stop)
        self._thread.join(_JOIN_S)
        for sock in (*self._listeners, self._wake, self._woken):
            sock.close()

    @property
    def ports(self) -> list[int]:
        """Where it listens, in the order of the nodes."""
        return [int(listener.getsockname()[1]) for listener in self._listeners]

    def urls(self) -> dict[str, str]:
        """The address that stands for each node."""
        names = self._listeners.values()
        return {name: format_url(HOST, port) for name, port in zip(names, self.ports, strict=True)}

    @property
    def fired(self) -> list[Fired]:
        """The faults that struck, in their order."""
        with self._changed:
            return list(self._fired)

    def wait_fired(self, count: int, seconds: float) -> bool:
        """Wait until `count` faults struck; False if `seconds` pass before."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._fired) >= count, seconds)

    def plan(self, *faults: Planned) -> None:
        """Have faults wait for their points."""
        self._order(lambda: self._planned.extend(faults))

    def always(self, node: str, fault: Fault) -> None:
        """Have every connection of `node` suffer `fault` from now on, until `heal`."""
        self._order(lambda: self._last(node, fault))

    def restart(self) -> None:
        """A new reply begins: tokens are counted anew, and nothing waits for a point any more."""
        self._order(self._restart)

    def heal(self) -> None:
        """End what lasts, and what connections suffer; those that lost bytes are reset."""
        self._order(self._heal)

    # What follows runs in the thread.

    def run(self) -> None:
        """Serve until it is told to stop."""
        while not self._stopped:
            self._step()
        for connection in self._connections:
            connection.close()

    def _step(self) -> None:
        lanes = {lane: c for c in self._connections for lane in c.lanes}
        readers = {lane.source: lane for lane in lanes if not lane.ended and not lane.full}
        writers = {lane.target: lane for lane in lanes if lane.blocked}
        # select, since poll and epoll count their time-outs in whole milliseconds here.
        ready, free, _ = select.select(
            [self._woken, *self._listeners, *readers], [*writers], [], self._wait(lanes)
        )
        if self._woken in ready:
            self._obey()
        now = perf_counter()
        for sock in ready:
            if sock in readers:
                lane = readers[sock]
                self._guarded(self._read, lanes[lane], lane, now)
            elif sock in self._listeners:
                self._accept(sock)
        for lane, connection in lanes.items():
            if not lane.blocked or lane.target in free:
                self._guarded(self._write, connection, lane, now)
        self._drop_finished()

    @staticmethod
    def _wait(lanes: Iterable[Lane]) -> float | None:
        """Seconds until the next byte is due; None if none is on its way."""
        due = [at for lane in lanes if (at := lane.next_at()) is not None]
        return max(0.0, min(due) - perf_counter()) if due else None

    @staticmethod
    def _guarded(
        act: Callable[[Connection, Lane, float], None],
        connection: Connection,
        lane: Lane,
        now: float,
    ) -> None:
        """A connection that breaks on one side is reset on both."""
        if connection.closed:
            return
        try:
            act(connection, lane, now)
        except OSError:
            connection.cut(reset=True)

    @staticmethod
    def _write(connection: Connection, lane: Lane, now: float) -> None:
        lane.write(now)

    def _read(self, connection: Connection, lane: Lane, now: float) -> None:
        data = lane.read()
        if data is None:
            return
        if lane is connection.to_driver or self._clock is None:
            lane.put(data, now)
            return
        for header, piece in connection.follower.feed(data):
            if header is not None and (point := self._clock.at(header)) is not None:
                self._reach(connection, point)
            if connection.closed:
                return
            lane.put(piece, now)
        if not data:
            if rest := connection.follower.rest():
                lane.put(rest, now)
            lane.put(b"", now)

    def _reach(self, connection: Connection, point: Point) -> None:
        """Strike with what has waited for this point."""
        due = [
            planned
            for planned in self._planned
            if planned.point <= point and planned.node in (None, connection.node)
        ]
        with self._changed:
            # Before anyone can feel it.
            at = perf_counter()
            self._fired += [Fired(planned, connection.node, point, at) for planned in due]
            self._changed.notify_all()
        for planned in due:
            self._planned.remove(planned)
            self._strike(connection, planned)

    def _strike(self, connection: Connection, planned: Planned) -> None:
        if planned.lasting:
            self._last(connection.node, planned.fault)
        else:
            connection.suffer(planned.fault)

    def _last(self, node: str, fault: Fault) -> None:
        self._lasting.append((node, fault))
        for connection in self._connections:
            if connection.node == node:
                connection.suffer(fault)

    def _restart(self) -> None:
        self._planned.clear()
        if self._clock is not None:
            self._clock.restart()

    def _heal(self) -> None:
        self._lasting.clear()
        for connection in self._connections:
            connection.heal()

    def _stop(self) -> None:
        self._stopped = True

    def _accept(self, listener: socket.socket) -> None:
        near, _ = listener.accept()
        node = self._listeners[listener]
        family, address = self._addresses[node]
        far = socket.socket(family, socket.SOCK_STREAM)
        for sock in (near, far):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(node, near, far, self._random)
        self._connections.append(connection)
        if far.connect_ex(address) not in (0, EINPROGRESS):
            connection.cut(reset=True)
        for sufferer, fault in self._lasting:
            if sufferer == node and not connection.closed:
                connection.suffer(fault)

    def _drop_finished(self) -> None:
        for connection in self._connections:
            if not connection.closed and connection.finished:
                connection.close()
        self._connections = [c for c in self._connections if not c.closed]

    def _order(self, act: Callable[[], None]) -> None:
        with self._changed:
            self._orders.append(act)
        self._wake.send(b"!")

    def _obey(self) -> None:
        self._woken.recv(4096)
        with self._changed:
            orders, self._orders = self._orders, []
        for act in orders:
            act()


def _listener() -> socket.socket:
    return socket.create_server((HOST, 0))


def _resolved(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """An address's family, and what connect() takes."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise name_unknown(format_url(host, port), error) from error
    return family, address

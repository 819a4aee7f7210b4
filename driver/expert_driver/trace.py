"""`--trace FILE`: what the driver and its nodes did and when, as Chrome trace events.

The file is the format's JSON array of complete ("X") and metadata ("M") events, which
https://ui.perfetto.dev and chrome://tracing open. Events of one track must lie inside each other
or apart, or viewers drop them: a node that has several dispatches gets a track for each of them.
Times are whole microseconds, so that no rounding makes two events overlap.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from expert_driver.figures import DispatchTimes, NodeTimes
from expert_driver.times import Watch, placed
from expert_network.errors import InputError

if TYPE_CHECKING:
    from expert_driver.dispatch.network import Network

#: Bytes that wait to be written.
KEPT = 1 << 16
#: Numbers of tracks for each node: at least as many as a link has dispatches outstanding.
LANES = 16

_DRIVER = 1
_END = b"\n]\n"
# A pipe that nobody reads is refused, and not waited for.
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK


class TraceFile:
    """Events to a file that is one JSON array after each write, whatever comes then.

    The first error of the disk ends the writing, and `close` raises it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        #: What waits, and where in the file it belongs: over the end of what is there.
        self._chunk = 0, bytearray(b"[")
        self._problem: OSError | None = None
        try:
            self._file = os.open(path, _FLAGS, 0o666)
            os.pwrite(self._file, b"[" + _END, 0)
        except OSError as error:
            raise _unwritable(path, error) from error

    def add(self, event: str) -> None:
        """Append an event, which is a JSON object."""
        if self._problem is not None:
            return
        at, waiting = self._chunk
        separator = ",\n" if at or len(waiting) > 1 else "\n"
        waiting += (separator + event).encode()
        if len(waiting) >= KEPT:
            self._write()

    def close(self) -> None:
        """Write what waits. Raises InputError if anything could not be written."""
        self._write()
        os.close(self._file)
        if self._problem is not None:
            raise _unwritable(self._path, self._problem) from self._problem

    def _write(self) -> None:
        # Whatever interrupts this, the next call writes the same bytes to the same place.
        if self._problem is not None:
            return
        at, waiting = self._chunk
        try:
            _write_all(self._file, bytes(waiting) + _END, at)
        except OSError as error:
            self._problem = error
            self._end_at(at)
            return
        self._chunk = at + len(waiting), bytearray()

    def _end_at(self, at: int) -> None:
        """End the array before what failed: the disk has given room for so many bytes."""
        with suppress(OSError):
            os.pwrite(self._file, _END if at else b"[" + _END, at)
            os.ftruncate(self._file, (at or 1) + len(_END))


def _write_all(file: int, data: bytes, at: int) -> None:
    while data:
        count = os.pwrite(file, data, at)
        data, at = data[count:], at + count


def _unwritable(path: Path, error: OSError) -> InputError:
    reason = error.strerror or str(error)
    return InputError(
        f"the trace {path} cannot be written ({reason}); name another file with --trace."
    )


class Tracer:
    """A Trace that makes events: one track for the driver, and one for each node."""

    def __init__(self, file: TraceFile) -> None:
        self._file = file
        self._started = perf_counter()
        #: For each node its number, and for each of its tracks when the last event there ended.
        self._nodes: dict[str, tuple[int, list[int]]] = {}
        self._name("process_name", _DRIVER, {"name": "expert-net"})
        self._name_track(_DRIVER, "driver")

    def expect(self, nodes: Iterable[str]) -> None:
        """Let the tracks of these nodes stand in this order."""
        for name in nodes:
            self._nodes.setdefault(name, (len(self._nodes), []))

    def worked(self, times: DispatchTimes | None, part: str, start: float, stop: float) -> None:
        """See times.Sink."""
        about = "" if times is None else f'"layer":{times.layer}'
        self._event(_DRIVER, part, self._us(start), self._us(stop), about)

    def waited(self, times: DispatchTimes, start: float, stop: float) -> None:
        """See times.Sink. The nodes' parts of the dispatch are traced with it."""
        about = f'"layer":{times.layer},"rows":{times.rows}'
        self._event(_DRIVER, "waiting", self._us(start), self._us(stop), about)
        for node in times.nodes:
            self._round_trip(times.layer, node)

    def chose(self, rows: int, began: float, computed: float, ended: float) -> None:
        """See times.Watch."""
        name = "token" if rows == 1 else "prompt"
        self._event(_DRIVER, name, self._us(began), self._us(ended), f'"rows":{rows}')
        self._event(_DRIVER, "sampling", self._us(computed), self._us(ended), "")

    def _round_trip(self, layer: int, node: NodeTimes) -> None:
        start, stop = self._us(node.sent), self._us(node.replied)
        arrived, begun, computed = (self._us(time) for time in placed(node))
        track = self._track(node.name, start, stop)
        about = f'"out":{node.out_bytes},"in":{node.in_bytes}'
        self._event(track, f"layer {layer}", start, stop, about)
        self._event(track, "queue", arrived, begun, "")
        self._event(track, "compute", begun, computed, "")

    def _track(self, name: str, start: int, stop: int) -> int:
        """The first track of a node that is free from `start` on; it is taken until `stop`."""
        number, ends = self._nodes.setdefault(name, (len(self._nodes), []))
        lane = next((lane for lane, end in enumerate(ends) if end <= start), len(ends))
        track = _DRIVER + 1 + LANES * number + lane
        if lane == len(ends):
            ends.append(0)
            self._name_track(track, f"node {name}" + (f" ({lane + 1})" if lane else ""))
        ends[lane] = stop
        return track

    def _us(self, time: float) -> int:
        return max(0, int((time - self._started) * 1e6))

    def _event(self, track: int, name: str, start: int, stop: int, about: str) -> None:
        # Names and numbers only: nothing in it needs escaping.
        if stop > start:
            self._file.add(
                f'{{"name":"{name}","ph":"X","pid":1,"tid":{track},'
                f'"ts":{start},"dur":{stop - start},"args":{{{about}}}}}'
            )

    def _name_track(self, track: int, name: str) -> None:
        self._name("thread_name", track, {"name": name})
        self._name("thread_sort_index", track, {"sort_index": track})

    def _name(self, kind: str, track: int, about: dict[str, Any]) -> None:
        event = {"name": kind, "ph": "M", "pid": 1, "tid": track, "args": about}
        self._file.add(json.dumps(event, separators=(",", ":")))


@contextmanager
def tracing(path: Path | None) -> Iterator[Tracer | None]:
    """What traces to the file of --trace, None without one; complete whatever ends it.

    Raises InputError if it cannot be written: at once, or at the end if nothing else did.
    """
    if path is None:
        yield None
        return
    file = TraceFile(path)
    try:
        yield Tracer(file)
    except BaseException:
        with suppress(InputError):
            file.close()
        raise
    file.close()


class Watched(Protocol):
    """An engine, which tells its watch of each token that is chosen."""

    watch: Watch | None


@contextmanager
def watching(
    engine: Watched, network: Network | None, tracer: Tracer | None = None
) -> Iterator[Watch]:
    """Within, where the time of an engine goes is watched, and traced if there is a tracer."""
    if tracer is not None and network is not None:
        tracer.expect(node.name for node in network.figures.nodes)
    watch = Watch(tracer)
    engine.watch = watch
    if network is not None:
        network.observer = watch.dispatched
    try:
        yield watch
    finally:
        engine.watch = None
        if network is not None:
            network.observer = None
        watch.close()

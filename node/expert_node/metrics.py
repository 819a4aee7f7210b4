"""What a node counts while it works, and how Prometheus reads it.

Counting happens in the threads of the links and must cost them nothing: plain numbers, which are
turned into Prometheus metrics only when somebody asks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Lock
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from expert_protocol.frames import ErrorCode

#: Seconds; a block of a small model takes tens of microseconds, a prefill chunk a second.
BOUNDS = (
    25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
PREFIX = "expert_node_"


class Histogram:
    """How often a duration fell between two bounds. Seconds."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds

    def add(self, now: Sequence[int], before: Sequence[int], seconds: float) -> None:
        """Count those that are in `now` and were not in `before`, `seconds` in all."""
        for place, (count, earlier) in enumerate(zip(now, before, strict=True)):
            self.counts[place] += count - earlier
        self.total += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, how many were at most that long), the last one "+Inf"."""
        names = [*(repr(bound) for bound in BOUNDS), "+Inf"]
        so_far, pairs = 0, []
        for name, count in zip(names, list(self.counts), strict=True):
            so_far += count
            pairs.append((name, float(so_far)))
        return pairs


class Counts(NamedTuple):
    """What one link has answered natively since it began. Seconds, and counts as Histogram's."""

    dispatches: int
    rows: int
    pairs: int
    queue_s: float
    compute_s: float
    queued: Sequence[int]
    computed: Sequence[int]


Source = Callable[[], Counts]


class Counters:
    """Counts since the node started. Any thread may add; a reader sees them a moment apart.

    `refresh` before reading: some links count for themselves.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._sources: dict[Source, Counts] = {}
        self.dispatches = self.rows = self.pairs = 0
        self.links_opened = 0
        self.bytes_received = self.bytes_sent = 0  # of links that have ended
        self.errors: Counter[ErrorCode] = Counter()
        self.queue, self.compute = Histogram(), Histogram()

    def computed(self, rows: int, pairs: int, queued: float, computed: float) -> None:
        """One dispatch was answered, after so many seconds of waiting and of computing."""
        with self._lock:
            self.dispatches += 1
            self.rows += rows
            self.pairs += pairs
            self.queue.observe(queued)
            self.compute.observe(computed)

    def watch(self, source: Source) -> None:
        """Count what `source` counts too."""
        with self._lock:
            self._sources[source] = source()

    def forget(self, source: Source) -> None:
        """Count what `source` has counted so far, and no more."""
        self.refresh()
        with self._lock:
            del self._sources[source]

    def refresh(self) -> None:
        """Add what the sources have counted since."""
        with self._lock:
            for source, before in self._sources.items():
                self._sources[source] = now = source()
                self.dispatches += now.dispatches - before.dispatches
                self.rows += now.rows - before.rows
                self.pairs += now.pairs - before.pairs
                self.queue.add(now.queued, before.queued, now.queue_s - before.queue_s)
                self.compute.add(now.computed, before.computed, now.compute_s - before.compute_s)

    def refused(self, code: ErrorCode) -> None:
        """One ERROR frame was sent."""
        with self._lock:
            self.errors[code] += 1

    def link_opened(self) -> None:
        """A link was handed over."""
        with self._lock:
            self.links_opened += 1

    def link_ended(self, received: int, sent: int) -> None:
        """A link is gone; what it carried, in bytes."""
        with self._lock:
            self.bytes_received += received
            self.bytes_sent += sent


class _NodeCollector(Collector):
    """Turns the counts into metrics at the moment of asking."""

    def __init__(
        self, counters: Counters, info: Mapping[str, str], gauges: Callable[[], Mapping[str, float]]
    ) -> None:
        self._counters, self._info, self._gauges = counters, info, gauges

    def collect(self) -> Iterator[Metric]:
        self._counters.refresh()
        yield InfoMetricFamily(
            f"{PREFIX}build", "What runs here and what it serves.", dict(self._info)
        )
        gauges = self._gauges()
        yield from (
            GaugeMetricFamily(f"{PREFIX}{name}", text, gauges[name])
            for name, text in GAUGES.items()
        )
        yield from self._counts(gauges)
        yield self._errors()
        yield _histogram("queue_seconds", "Waiting for the processor.", self._counters.queue)
        yield _histogram("compute_seconds", "Computing a dispatch.", self._counters.compute)

    def _counts(self, gauges: Mapping[str, float]) -> Iterator[Metric]:
        counters = self._counters
        for name, text, value in (
            ("dispatches", "Dispatches answered.", counters.dispatches),
            ("rows", "Rows in them.", counters.rows),
            ("pairs", "Pairs of a row and an expert in them.", counters.pairs),
            ("links_opened", "Links handed over.", counters.links_opened),
            ("received_bytes", "Bytes that came over links.", gauges["received_bytes"]),
            ("sent_bytes", "Bytes that went over links.", gauges["sent_bytes"]),
        ):
            yield CounterMetricFamily(f"{PREFIX}{name}", text, value)

    def _errors(self) -> Metric:
        family = CounterMetricFamily(
            f"{PREFIX}errors", "ERROR frames sent, by code.", labels=["code"]
        )
        for code in ErrorCode:
            family.add_metric([code.name.lower()], self._counters.errors[code])
        return family


#: The gauges that the daemon supplies, with "received_bytes" and "sent_bytes" besides.
GAUGES = {
    "links": "Links that are open.",
    "partition_bytes": "Bytes of the blocks in memory.",
    "partition_blocks": "Blocks in memory.",
    "resident_memory_bytes": "Resident memory of the process.",
    "peak_resident_memory_bytes": "The most resident memory that the process has had.",
    "uptime_seconds": "Seconds since the node was ready.",
}


def exposition(
    counters: Counters, info: Mapping[str, str], gauges: Callable[[], Mapping[str, float]]
) -> Callable[[], bytes]:
    """A function that writes the metrics down in Prometheus' text format, version 0.0.4."""
    registry = CollectorRegistry()
    registry.register(_NodeCollector(counters, info, gauges))
    return lambda: generate_latest(registry)


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    return HistogramMetricFamily(f"{PREFIX}{name}", text, histogram.buckets(), histogram.total)

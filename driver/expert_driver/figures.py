"""What a reply cost: counters that the dispatcher fills, and the lines that -v makes of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from expert_network.units import duration, size

KEPT = 1 << 16  # newest single-row dispatches that the median is taken of

Finish = Literal["stop", "length"]


@dataclass
class Timing:
    """One reply's figures. Times in seconds; `reused` prompt tokens stood in the cache already."""

    prompt_tokens: int = 0
    reused: int = 0
    tokens: int = 0
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeTimes:
    """One node's part of one dispatch. `sent` and `replied` are perf_counter seconds.

    sent: when its first frame had been handed to the kernel. replied: when its last reply had been
    read. Microseconds are the node's own, added over its frames; bytes are those at the socket.
    """

    name: str
    sent: float
    replied: float
    queue_us: int
    compute_us: int
    out_bytes: int
    in_bytes: int


@dataclass(frozen=True, slots=True)
class DispatchTimes:
    """When one dispatch of `rows` rows was where, in perf_counter seconds.

    entered: when it was asked for. evaluated: when its rows, ids and weights were known, which is
    when the attention before it had been computed. sent: when all nodes had been asked. done: when
    all replies were there. `nodes` are those that had a part in it, in the order of the roster.
    """

    layer: int
    rows: int
    entered: float
    evaluated: float
    sent: float
    done: float
    nodes: tuple[NodeTimes, ...]


@dataclass
class NodeFigures:
    """One node's part. Bytes are counted at the socket; microseconds are the node's own."""

    name: str
    dispatches: int = 0
    rows: int = 0
    pairs: int = 0
    sent: int = 0
    received: int = 0
    queue_us: int = 0
    compute_us: int = 0

    def reset(self) -> None:
        """Start counting anew."""
        self.dispatches = self.rows = self.pairs = self.sent = self.received = 0
        self.queue_us = self.compute_us = 0

    def add(
        self,
        dispatches: int,
        rows: int,
        pairs: int,
        queue_us: int,
        compute_us: int,
        sent: int,
        received: int,
    ) -> None:
        """Count dispatches that were answered."""
        self.dispatches += dispatches
        self.rows += rows
        self.pairs += pairs
        self.sent += sent
        self.received += received
        self.queue_us += queue_us
        self.compute_us += compute_us


@dataclass
class NetworkFigures:
    """All dispatches since the last `reset`.

    Those of a single row are counted apart: a token that is generated costs one in each layer.
    `single_s` are their durations in seconds, `single_bytes` what they sent and received.
    `failovers`: how often a node's part was asked of others, since it did not answer; `hedges`:
    since it was late.
    """

    mode: str
    wire: str
    layers: int
    nodes: list[NodeFigures]
    dispatches: int = 0
    singles: int = 0
    single_bytes: int = 0
    failovers: int = 0
    hedges: int = 0
    single_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))

    def count(self, rows: int, seconds: float, traffic: int) -> None:
        """Add one dispatch of `rows` rows that moved `traffic` bytes."""
        self.dispatches += 1
        if rows == 1:
            self.singles += 1
            self.single_bytes += traffic
            self.single_s.append(seconds)

    def reset(self) -> None:
        """Start counting anew."""
        for node in self.nodes:
            node.reset()
        self.dispatches = self.singles = self.single_bytes = 0
        self.failovers = self.hedges = 0
        self.single_s.clear()

    @property
    def bytes_per_token(self) -> float:
        """Bytes sent and received for one generated token; 0 before there was one."""
        return self.single_bytes / self.singles * self.layers if self.singles else 0.0

    @property
    def layer_s(self) -> float:
        """Median seconds of one layer's dispatch of a single row; 0 before there was one."""
        return median(self.single_s) if self.single_s else 0.0


def lines(
    timing: Timing,
    network: NetworkFigures | None,
    peak_bytes: int,
    mode: str,
    computing: str,
    where: Sequence[str] = (),
) -> list[str]:
    """The figures of one reply, in lines for 80 columns; docs/driver.md says how to read them.

    `mode` is "sum" or "exact", `computing` names the kernels of this process, `where` says where
    the time of a token went.
    """
    read = timing.prompt_tokens - timing.reused
    rate = (timing.tokens - 1) / timing.decode_s if timing.decode_s else 0.0
    found = [
        f"{timing.tokens} tokens, {rate:.1f} tok/s; prompt {timing.prompt_tokens} tokens, "
        f"{timing.reused} reused, {read / timing.prefill_s if timing.prefill_s else 0:.1f} tok/s",
        f"first token after {duration(timing.first_token_s)}; peak memory {size(peak_bytes)}",
    ]
    if network is None:
        return [*found, f"experts: all in this process, {mode}; kernels: {computing}", *where]
    found += [
        f"experts: {len(network.nodes)} nodes, {network.mode} replies, {network.wire} on the wire",
        f"kernels here: {computing}",
        f"{duration(network.layer_s)} per layer (median), "
        f"{size(network.bytes_per_token)} per token",
    ]
    if network.failovers:
        found.append(f"failovers: {network.failovers} parts of a layer were asked of other nodes")
    if network.hedges:
        found.append(f"hedges: {network.hedges} late parts of a layer were asked of others too")
    return [*found, *where, *shares(network.nodes)]


def cut_short(finish: Finish | None, timing: Timing) -> str | None:
    """A note for a reply that did not come to its own end."""
    if finish != "length":
        return None
    return f"[cut at {timing.tokens} tokens; --max-tokens allows more]"


def shares(nodes: Sequence[NodeFigures]) -> list[str]:
    """Who did how much: a line of headers, and one for each node in the order of the roster."""
    pairs = sum(node.pairs for node in nodes) or 1
    width = max(len("node"), *(len(node.name) for node in nodes))
    cells = [("pairs", "rows", "out", "in", "computing", "waiting")] + [
        (
            f"{node.pairs / pairs:.1%}",
            str(node.rows),
            size(node.sent),
            size(node.received),
            _mean(node.compute_us, node),
            _mean(node.queue_us, node),
        )
        for node in nodes
    ]
    names = ["node", *(node.name for node in nodes)]
    return [
        f"{name:<{width}}" + "".join(f"  {cell:>9}" for cell in row)
        for name, row in zip(names, cells, strict=True)
    ]


def _mean(microseconds: int, node: NodeFigures) -> str:
    return duration(microseconds / 1e6 / node.dispatches) if node.dispatches else "-"

"""Where the time of a pass goes: what its dispatches tell, cut into parts that add up to it.

All of a driver's work is on one thread. So between the beginning of a pass and its end it does one
thing after another, and each stretch of time ends where a dispatch has been sent (before it was
attention, then packing) or where its replies are complete (before it was waiting). Passes that take
turns are cut in the same way: a stretch then begins where the other one left off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from operator import attrgetter, itemgetter
from typing import Protocol

from expert_driver.figures import DispatchTimes, NodeTimes
from expert_network.units import duration

#: Dispatches that are kept at most until their pass ends: a prompt of 16 chunks and 64 layers.
KEPT = 1024


@dataclass(slots=True)
class Parts:
    """Seconds by what they went into, summed over some passes. docs/driver.md defines each."""

    attention: float = 0.0
    packing: float = 0.0
    wire: float = 0.0
    queue: float = 0.0
    compute: float = 0.0
    straggler: float = 0.0
    sampling: float = 0.0

    @property
    def total(self) -> float:
        """All parts together."""
        return float(sum(astuple(self)))

    def clear(self) -> None:
        """Set all to 0."""
        for field in fields(self):
            setattr(self, field.name, 0.0)


class Sink(Protocol):
    """What stretches of time are told to. Times are perf_counter seconds; stop >= start."""

    def worked(self, times: DispatchTimes | None, part: str, start: float, stop: float) -> None:
        """Attention or packing for a dispatch, or for none (after the last one): what `part` is."""

    def waited(self, times: DispatchTimes, start: float, stop: float) -> None:
        """Waiting for the replies of a dispatch, up to when they were complete."""


_KEY = itemgetter(0)
_replied = attrgetter("replied")


def cut(records: Sequence[DispatchTimes], began: float, ended: float, sink: Sink) -> None:
    """Tell `sink` every stretch from `began` to `ended`: together they leave out no time."""
    points = [(times.sent, False, times) for times in records]
    points += [(times.done, True, times) for times in records]
    points.sort(key=_KEY)
    at = began
    for time, complete, times in points:
        time = max(at, time)
        if complete:
            sink.waited(times, at, time)
        else:
            evaluated = min(max(at, times.evaluated), time)
            sink.worked(times, "attention", at, evaluated)
            sink.worked(times, "packing", evaluated, time)
        at = time
    sink.worked(None, "attention", at, max(at, ended))


def inside(times: DispatchTimes) -> tuple[float, float, float, float, float]:
    """When a dispatch was done with wire, queue, compute, wire again, and its stragglers.

    Up to the first reply it is what the node that gave it was doing.
    """
    first = min(times.nodes, key=_replied)
    return *placed(first), first.replied, max(times.nodes, key=_replied).replied


def placed(node: NodeTimes) -> tuple[float, float, float]:
    """When a node had the rows, began to compute, and was done with it, as far as that is known.

    Node and driver do not compare clocks, so the node's time is put into the middle of the round
    trip, and never made longer than that.
    """
    trip, queue, compute = node.replied - node.sent, node.queue_us * 1e-6, node.compute_us * 1e-6
    if queue + compute > trip:
        trip = max(0.0, trip)
        queue = min(queue, trip)
        compute = min(compute, trip - queue)
    arrived = node.sent + (trip - queue - compute) / 2
    return arrived, arrived + queue, arrived + queue + compute


class Ledger:
    """A Sink that adds all stretches up."""

    def __init__(self) -> None:
        self.parts = Parts()

    def worked(self, times: DispatchTimes | None, part: str, start: float, stop: float) -> None:
        if part == "packing":
            self.parts.packing += stop - start
        else:
            self.parts.attention += stop - start

    def waited(self, times: DispatchTimes, start: float, stop: float) -> None:
        parts, at, spent = self.parts, start, []
        for end in inside(times):
            # Within the stretch, and after the one before it.
            end = at if end < at else end if end < stop else stop
            spent.append(end - at)
            at = end
        there, queue, compute, back, straggler = spent
        parts.wire += there + back
        parts.queue += queue
        parts.compute += compute
        parts.straggler += straggler
        parts.packing += stop - at


class Watch:
    """What an engine and its network tell as they go. `parts` holds the last reply's tokens.

    The network's `observer` is `dispatched`; the engine tells each choice of a token. `trace` is
    told everything, prompts included.
    """

    def __init__(self, trace: Trace | None = None) -> None:
        self.tokens = 0
        self._ledger, self._trace = Ledger(), trace
        self._records: list[DispatchTimes] = []
        self._at = 0.0

    @property
    def parts(self) -> Parts:
        """Seconds of the passes that `tokens` counts."""
        return self._ledger.parts

    def dispatched(self, times: DispatchTimes) -> None:
        """A dispatch is complete."""
        self._records.append(times)
        if len(self._records) >= KEPT:
            self._settle()

    def restart(self) -> None:
        """Count the tokens that come from here on: the prompt has been read."""
        self.tokens = 0
        self.parts.clear()

    def chose(self, rows: int, began: float, computed: float, ended: float) -> None:
        """The next token was chosen at `ended`, from logits that were there at `computed`.

        A pass, or several, had begun to read `rows` tokens at `began`.
        """
        if self._records and self._records[0].sent < began:
            self._settle(began)
        began = max(began, self._at)
        records = self._records
        cut(records, began, computed, self._ledger)
        self.parts.sampling += ended - computed
        self.tokens += 1
        if self._trace is not None:
            cut(records, began, computed, self._trace)
            self._trace.chose(rows, began, computed, ended)
        records.clear()

    def close(self) -> None:
        """Tell the trace what is left of a pass that broke off."""
        self._settle()

    def _settle(self, before: float = float("inf")) -> None:
        """Trace the dispatches sent before that time, whose pass broke off or is a long one."""
        old = [times for times in self._records if times.sent < before]
        self._records = [times for times in self._records if times.sent >= before]
        if not old:
            return
        began = max(self._at, min(times.entered for times in old))
        self._at = max(times.done for times in old)
        if self._trace is not None:
            cut(old, began, self._at, self._trace)


class Trace(Sink, Protocol):
    """A Sink that is also told of whole passes."""

    def chose(self, rows: int, began: float, computed: float, ended: float) -> None:
        """See Watch.chose; all stretches of the passes have been told."""


def lines(watch: Watch, network: bool) -> list[str]:
    """Where the time of a token went, on the average: a line of headers and one of figures."""
    if not watch.tokens:
        return []
    parts = watch.parts
    if not network:
        model, sampling = parts.total - parts.sampling, parts.sampling
        spent, chosen = (duration(seconds / watch.tokens) for seconds in (model, sampling))
        return [f"per token: {spent} in the model, {chosen} sampling"]
    names = [field.name for field in fields(parts)]
    seconds = [*astuple(parts), parts.total]
    cells = [duration(value / watch.tokens) for value in seconds]
    widths = [max(8, len(name)) for name in [*names, "token"]]
    return [
        " ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        for row in ([*names, "token"], cells)
    ]

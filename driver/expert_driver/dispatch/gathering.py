"""Sending one dispatch to several nodes at once and gathering every reply, against the clock."""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic, perf_counter
from typing import Any

import numpy.typing as npt

from expert_driver.dispatch.links import Link
from expert_driver.dispatch.routing import Share
from expert_driver.figures import NodeFigures, NodeTimes
from expert_network.errors import NodeError, NodeRefused, NodeTimeout
from expert_protocol.dtypes import WireDType, finite
from expert_protocol.frames import Dispatch, Reply, ReplyMode, Working, rows_that_fit

SILENCE_S = 5.0  # without a frame from a node that owes one; a busy node says WORKING each second
LIMIT_S = 600.0  # for one part in all, however often the node says that it is working
GRACE_S = 0.5  # for the others to reply once a node has failed, so that the error comes within 1 s
# Of a dispatch and of its reply. Replies are read one after the other, and a node that waits its
# turn gives up after its own limit; what the kernel's buffers hold does not wait.
PART_BYTES = 2 << 20

Raw = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """What a layer asks of all nodes together.

    rows: raw (N, D), once for each dtype that a node is asked in. ids: uint16 (N, k) and weights:
    float32 (N, k).
    """

    layer: int
    epoch: int
    mode: ReplyMode
    rows: Mapping[WireDType, Raw]
    ids: Raw
    weights: Raw

    def dispatch(self, share: Share, dtype: WireDType) -> Dispatch:
        """The frame for one share."""
        rows = self.rows[dtype]
        if len(share.rows) != len(rows):
            rows = rows[share.rows]
        ids = self.ids.reshape(-1)[share.pairs]
        weights = self.weights.reshape(-1)[share.pairs]
        return Dispatch(self.layer, self.epoch, self.mode, dtype, rows, share.offsets, ids, weights)


@dataclass(slots=True, eq=False)
class Job:
    """One node's part of a call, in as many dispatches as its limits ask for.

    `replies` pairs each part with its values, raw (R, D) or (P, D).
    """

    link: Link
    call: Call
    dtype: WireDType
    waiting: deque[Share]
    figures: NodeFigures
    replies: list[tuple[Share, Raw]] = field(default_factory=list)
    silent_at: float = 0.0
    late_at: float = 0.0
    traffic: tuple[int, int] = (0, 0)
    #: For NodeTimes.
    sent: float = 0.0
    replied: float = 0.0
    spent_us: tuple[int, int] = (0, 0)
    moved: tuple[int, int] = (0, 0)

    def send(self) -> bool:
        """Send the first part that waits; False, since its reply is owed."""
        self.late_at, self.traffic = monotonic() + LIMIT_S, self.link.traffic
        self.link.dispatch(self.call.dispatch(self.waiting[0], self.dtype), SILENCE_S)
        self.sent = self.sent or perf_counter()
        self.silent_at = monotonic() + SILENCE_S
        return False

    def take(self, frame_s: float | None) -> bool:
        """Read the frame that has begun to arrive, in `frame_s`; True once nothing more is owed."""
        event = self.link.receive(SILENCE_S, frame_s)
        now = monotonic()
        self.silent_at = now + SILENCE_S
        if not isinstance(event, Reply):
            assert isinstance(event, Working), event
            return self.check(now)
        if not finite(event.data, event.dtype):
            self.link.close()
            problem = "answered with values that are not finite"
            raise NodeRefused(self.link.name, problem, "see its log, and `expert-net verify`")
        share = self.waiting.popleft()
        # The reply's memory is the link's, and the next frame's too.
        self.replies.append((share, event.data.copy()))
        self._count(share, event)
        if self.waiting:
            self.send()
        return not self.waiting

    def _count(self, share: Share, reply: Reply) -> None:
        figures = self.figures
        figures.dispatches += 1
        figures.rows += len(share.rows)
        figures.pairs += len(share.pairs)
        figures.queue_us += reply.queue_us
        figures.compute_us += reply.compute_us
        sent, received = self.link.traffic
        out, back = sent - self.traffic[0], received - self.traffic[1]
        figures.sent += out
        figures.received += back
        self.replied = perf_counter()
        self.spent_us = self.spent_us[0] + reply.queue_us, self.spent_us[1] + reply.compute_us
        self.moved = self.moved[0] + out, self.moved[1] + back

    @property
    def times(self) -> NodeTimes:
        """What it took, once nothing more is owed."""
        return NodeTimes(self.link.name, self.sent, self.replied, *self.spent_us, *self.moved)

    @property
    def deadline(self) -> float:
        """When the node will have been silent, or busy, for too long."""
        return min(self.silent_at, self.late_at)

    def check(self, now: float) -> bool:
        """False, since its reply is owed. Past the deadline, closes the link: NodeTimeout."""
        if now < self.deadline:
            return False
        self.link.close()
        if now >= self.silent_at:
            problem = f"has sent nothing for {SILENCE_S:g} s"
            raise NodeTimeout(self.link.name, problem, "see whether it and its network are up")
        problem = f"has worked on one dispatch for {LIMIT_S:g} s"
        raise NodeTimeout(self.link.name, problem, "see what keeps it busy")


def parts(share: Share, link: Link, call: Call, dtype: WireDType) -> deque[Share]:
    """`share` in parts, in order, that are within the node's limits and PART_BYTES.

    A part has at least one row, however long that is.
    """
    welcome = link.greeting.welcome
    hidden, k = dtype.hidden(call.rows[dtype].shape[1]), call.ids.shape[1]
    payload = min(welcome.max_payload, PART_BYTES)
    rows = rows_that_fit(hidden, k, call.mode, dtype, welcome.max_rows, payload)
    if len(share.rows) <= rows:
        return deque((share,))
    return deque(share.part(start, start + rows) for start in range(0, len(share.rows), rows))


class Gathering:
    """All jobs of one dispatch, sent: those that are owed a reply, by descriptor.

    If a node fails the others may still reply for GRACE_S; then the first failure is raised. Links
    that failed or still owe a reply are closed, also when an interrupt breaks this off.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._owing: dict[int, Job] = {}
        self._poll = select.poll()
        self._over_at = float("inf")
        self._failed: list[NodeError] = []
        try:
            for job in jobs:
                self._begin(job)
        except BaseException:
            self.abandon()
            raise

    def finish(self) -> None:
        """Take all replies. Raises NodeError, also when called again after it has failed."""
        try:
            self._take_all()
        finally:
            self.abandon()
        if self._failed:
            raise self._failed[0]

    def abandon(self) -> None:
        """Close the links that still owe a reply."""
        for job in self._owing.values():
            job.link.close()

    def _begin(self, job: Job) -> None:
        descriptor = job.link.fileno()
        self._owing[descriptor] = job
        self._poll.register(descriptor, select.POLLIN)
        self._try(descriptor, job.send)

    def _take_all(self) -> None:
        while self._owing and (now := monotonic()) < self._over_at:
            for descriptor in self._arrived(now):
                if self._try(descriptor, partial(self._owing[descriptor].take, self._left())):
                    self._forget(descriptor)
            self._expire()

    def _left(self) -> float | None:
        """Seconds for a frame to be complete, once a node has failed."""
        return None if not self._failed else max(0.0, self._over_at - monotonic())

    def _arrived(self, now: float) -> list[int]:
        """Descriptors with something to read, waiting until the next deadline for one."""
        left = min(self._over_at, *(job.deadline for job in self._owing.values())) - now
        # Rounded up: poll counts whole milliseconds, and 0 would spin until the deadline.
        return [descriptor for descriptor, _ in self._poll.poll(max(0, int(left * 1000) + 1))]

    def _expire(self) -> None:
        now = monotonic()
        late = [descriptor for descriptor, job in self._owing.items() if now >= job.deadline]
        if not late:
            return
        # One node's frame can take longer than another may be silent: what that one has sent
        # meanwhile is there to be read.
        readable = {descriptor for descriptor, _ in self._poll.poll(0)}
        for descriptor in late:
            if descriptor not in readable:
                self._try(descriptor, partial(self._owing[descriptor].check, now))

    def _try(self, descriptor: int, act: Callable[[], bool]) -> bool:
        try:
            return act()
        except NodeError as error:
            self._fail(descriptor, error)
            return False

    def _fail(self, descriptor: int, error: NodeError) -> None:
        self._forget(descriptor)
        self._failed.append(error)
        self._over_at = min(self._over_at, monotonic() + GRACE_S)

    def _forget(self, descriptor: int) -> None:
        del self._owing[descriptor]
        self._poll.unregister(descriptor)

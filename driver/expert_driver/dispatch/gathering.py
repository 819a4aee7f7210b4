"""One layer's question to all nodes: its parts, who owes what of it, and what has gone wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic, perf_counter
from typing import Any

import numpy.typing as npt

from expert_driver.dispatch.links import Link
from expert_driver.dispatch.routing import Share
from expert_driver.dispatch.values import Values
from expert_driver.figures import NodeFigures, NodeTimes
from expert_network.errors import ExpertNetworkError, NodeRefused
from expert_protocol.dtypes import WireDType
from expert_protocol.frames import Dispatch, Reply, ReplyMode, rows_that_fit

# Of a dispatch and of its reply, so that neither end holds more of it at a time. 512 rows of 8192
# values fit as bf16: a node then reads its experts' weights once for a chunk of a prompt.
PART_BYTES = 8 << 20

Raw = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """What a layer asks of all nodes together, but for who computes what.

    rows: raw (N, columns(D)), once for each dtype that a node is asked in. k: experts of a row.
    """

    layer: int
    epoch: int
    mode: ReplyMode
    rows: Mapping[WireDType, Raw]
    k: int
    precise: bool = False

    def dispatch(self, share: Share, dtype: WireDType, adopt: bool = False) -> Dispatch:
        """The frame for one share. adopt: its node may have to get a block first."""
        rows = self.rows[dtype]
        if len(share.rows) != len(rows):
            rows = rows[share.rows]
        return Dispatch(
            self.layer, self.epoch, self.mode, dtype, rows, share.offsets, share.ids,
            share.weights, self.precise, adopt,
        )  # fmt: skip


class Job:
    """One node's part of a call, in as many dispatches as its limits ask for.

    place: its number among the jobs of the call. left: parts that are not answered. cause: why the
    node that was asked for this before did not answer. rivals: whose answer counts instead, if it
    is there first.
    """

    __slots__ = (
        "adopt", "call", "cause", "compute_us", "done", "dtype", "figures", "gathering", "in_bytes",
        "left", "link", "out_bytes", "parts", "place", "queue_us", "replied", "rivals", "sent",
        "supplied",
    )  # fmt: skip

    gathering: Gathering | None

    def __init__(
        self,
        link: Link,
        call: Call,
        dtype: WireDType,
        parts: Sequence[Share],
        figures: NodeFigures,
        adopt: bool = False,
        cause: ExpertNetworkError | None = None,
    ) -> None:
        self.adopt, self.cause, self.gathering = adopt, cause, None
        self.rivals: Rivals | None = None
        #: Whether its node has got the blocks from us.
        self.supplied = False
        self.link, self.call, self.dtype, self.figures = link, call, dtype, figures
        self.parts, self.left = parts, len(parts)
        self.place = 0
        self.done = False
        self.sent = self.replied = 0.0
        self.queue_us = self.compute_us = self.out_bytes = self.in_bytes = 0

    def dispatch(self, share: Share) -> Dispatch:
        """The frame for one of its parts."""
        return self.call.dispatch(share, self.dtype, self.adopt)

    @property
    def unanswered(self) -> Sequence[Share]:
        """Its parts that are not answered; those are, in their order."""
        return self.parts[len(self.parts) - self.left :]

    def count(self, share: Share, reply: Reply, out: int, back: int) -> None:
        """Add the figures of one part that was answered."""
        queue_us, compute_us = reply.queue_us, reply.compute_us
        self.figures.add(1, len(share.rows), len(share.pairs), queue_us, compute_us, out, back)
        self.queue_us += queue_us
        self.compute_us += compute_us
        self.out_bytes += out
        self.in_bytes += back
        self.replied = perf_counter()

    @property
    def times(self) -> NodeTimes:
        """What it took, once nothing more is owed."""
        return NodeTimes(
            self.link.name, self.sent, self.replied, self.queue_us, self.compute_us,
            self.out_bytes, self.in_bytes,
        )  # fmt: skip


class Rivals:
    """Jobs that together ask others for all that one late `job` of one part was asked for.

    kept: what has come of them.
    """

    def __init__(self, job: Job, others: Sequence[Job]) -> None:
        self.job, self.others = job, others
        self.kept: dict[Job, tuple[Share, Reply]] = {}


class Gathering:
    """The jobs of one call while they are under way. `values` takes what comes.

    owing: how many are neither finished nor failed. failed: what went wrong, in that order.
    over_at: when, by monotonic(), the others have had their time after a failure. given_up: the
    nodes that have not answered a part of it, which are not asked again.
    """

    def __init__(self, jobs: Sequence[Job], values: Values) -> None:
        self.jobs, self.values = list(jobs), values
        self.given_up: set[str] = set()
        self.asked = monotonic()
        self.owing = len(jobs)
        self.failed: list[ExpertNetworkError] = []
        self.over_at = float("inf")
        for place, job in enumerate(jobs):
            job.place, job.gathering = place, self

    def take(self, job: Job, share: Share, reply: Reply) -> None:
        """Take the answer to one part. Raises NodeRefused for values that are not finite."""
        if job.done:  # it has failed or lost, and this was under way
            return
        if job.rivals is not None and job.rivals.job is not job:
            self._keep(job.rivals, job, share, reply)
            return
        self.withdraw(job)
        self._put(job, share, reply)

    def _put(self, job: Job, share: Share, reply: Reply) -> None:
        if not self.values.put(job.place, share, reply.data, reply.dtype):
            job.link.close()
            problem = "answered with values that are not finite"
            raise NodeRefused(job.link.name, problem, "see its log, and `expert-net verify`")
        job.left -= 1
        if not job.left:
            self.values.finish(job.place)
            job.done = True
            self.owing -= 1

    def hedge(self, job: Job, others: Sequence[Job]) -> None:
        """Let others answer `job`, whose only part is late: what is whole first counts."""
        job.rivals = Rivals(job, others)
        for other in others:
            other.place, other.gathering, other.rivals = len(self.jobs), self, job.rivals
            self.jobs.append(other)

    def withdraw(self, job: Job) -> None:
        """Let the rivals of `job` have lost, if there are any."""
        rivals, job.rivals = job.rivals, None
        if rivals is not None:
            for other in rivals.others:
                other.done = True
                self.values.finish(other.place)

    def _keep(self, rivals: Rivals, job: Job, share: Share, reply: Reply) -> None:
        """Keep what a rival has answered, until all have and the late job has lost."""
        rivals.kept[job] = share, replace(reply, data=reply.data.copy())
        if len(rivals.kept) < len(rivals.others):
            return
        late = rivals.job
        late.rivals, late.done = None, True
        self.values.finish(late.place)
        self.owing += len(rivals.others) - 1
        for other, (part, answer) in rivals.kept.items():
            other.rivals = None
            self._put(other, part, answer)

    @property
    def traffic(self) -> int:
        """Bytes that went and came."""
        return sum(job.out_bytes + job.in_bytes for job in self.jobs)

    def times(self) -> tuple[NodeTimes, ...]:
        """What it took, once nothing is owed."""
        return tuple(job.times for job in self.jobs if job.replied)

    def replace(self, job: Job, others: Sequence[Job]) -> None:
        """Owe what `job` has not answered to others, instead of it."""
        job.done = True
        self.values.finish(job.place)
        for other in others:
            other.place, other.gathering = len(self.jobs), self
            self.jobs.append(other)
        self.owing += len(others) - 1

    def fail(self, job: Job, error: ExpertNetworkError, over_at: float) -> None:
        """Count `job` as failed; the others have until `over_at`."""
        if not job.done:
            job.done = True
            self.owing -= 1
            self.failed.append(error)
            self.over_at = min(self.over_at, over_at)


def parts(share: Share, link: Link, call: Call, dtype: WireDType) -> Sequence[Share]:
    """`share` in parts, in order, that are within the node's limits and PART_BYTES.

    A part has at least one row, however long that is.
    """
    if len(share.rows) == 1:
        return (share,)
    welcome = link.greeting.welcome
    hidden, payload = dtype.hidden(call.rows[dtype].shape[1]), min(welcome.max_payload, PART_BYTES)
    rows = rows_that_fit(hidden, call.k, call.mode, dtype, welcome.max_rows, payload)
    if len(share.rows) <= rows:
        return (share,)
    return [share.part(start, start + rows) for start in range(0, len(share.rows), rows)]

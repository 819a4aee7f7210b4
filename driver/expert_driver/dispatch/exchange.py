"""All that is under way on the links of one network, sent and read as bytes go and come.

A node answers the dispatches of a link in their order, so each link has a queue of parts that are
owed. Nothing here waits for one link while another has something to say.
"""

from __future__ import annotations

import select
from collections import deque
from copy import copy
from dataclasses import dataclass
from time import monotonic, perf_counter

from expert_driver.dispatch.gathering import Gathering, Job
from expert_driver.dispatch.links import Link
from expert_driver.dispatch.routing import Share
from expert_network.errors import (
    Cancelled,
    ExpertNetworkError,
    NodeError,
    NodeRefused,
    NodeTimeout,
)
from expert_network.net.stream import LATE_LOOK, SLOWEST
from expert_protocol.frames import Reply

SILENCE_S = 5.0  # without a frame from a node that owes one; a busy node says WORKING each second
LIMIT_S = 600.0  # for one part in all, however often the node says that it is working
GRACE_S = 0.5  # for the others to reply once a node has failed, so that the error comes within 1 s
WINDOW = 4  # parts of one link under way: one is computed while the next one travels
PUSH_S = 0.01  # without a byte taken, until what a node has no room for is left for later

_IN, _IN_OUT = select.POLLIN, select.POLLIN | select.POLLOUT


@dataclass(slots=True, eq=False)
class _Part:
    """One dispatch. `size` is that of its frame, 0 before it was pushed."""

    job: Job
    share: Share
    size: int = 0


class _Lane:
    """One link's queue. since: when, by monotonic(), the oldest part began to be the oldest."""

    __slots__ = ("descriptor", "link", "owed", "since", "taken", "waiting")

    def __init__(self, link: Link) -> None:
        self.link, self.descriptor = link, link.fileno()
        self.owed: deque[_Part] = deque()
        self.waiting: deque[_Part] = deque()
        self.taken, self.since = link.bytes_taken, 0.0


class Exchange:
    """The dispatches under way. Used by one thread.

    When a link fails, every gathering that is owed something on it fails.
    """

    def __init__(self) -> None:
        self._lanes: dict[int, _Lane] = {}  # by descriptor
        self._poll = select.poll()
        self._pushing: set[_Lane] = set()
        #: When deadlines are looked at next, and when what had come was last looked at anew.
        self._check_at, self._looked = float("inf"), 0.0

    def busy(self, link: Link) -> bool:
        """Whether something is under way on `link`."""
        lane = self._lanes.get(link.fileno())
        return lane is not None and lane.link is link and bool(lane.owed)

    def ask(self, gathering: Gathering) -> None:
        """Send all jobs, as far as the nodes have room for them."""
        try:
            for job in gathering.jobs:
                lane = self._lane(job.link)
                lane.waiting.extend([_Part(job, share) for share in job.parts])
                self._try(lane)
            self._push_all()
        except BaseException:
            self.abandon()
            raise

    def wait(self, gathering: Gathering) -> None:
        """Take replies until none of these is owed. Raises the first failure, soon after it.

        Links that still owe a reply then are closed, and all are that owe anything when an
        interrupt breaks this off.
        """
        try:
            # What has come by now came in time, however late we look: there is time to take it.
            self._looked = monotonic()
            self._check_at = self._looked + LATE_LOOK
            while gathering.owing and monotonic() < gathering.over_at:
                self._step()
            self._push_all()
        except BaseException:
            self.abandon()
            raise
        if gathering.failed:
            self._end(gathering)
            raise gathering.failed[0]

    def abandon(self) -> None:
        """Close every link on which something is owed."""
        for lane in list(self._lanes.values()):
            if lane.owed or lane.waiting:
                lane.link.close()
                self._fail(lane, Cancelled("the dispatch was given up"))

    # One turn

    def _step(self) -> None:
        left = self._check_at - monotonic()
        # Rounded up: poll counts whole milliseconds, and 0 would spin until the deadline.
        for descriptor, events in self._poll.poll(max(0, int(left * 1000) + 1)):
            lane = self._lanes.get(descriptor)
            if lane is not None:
                self._try(lane, events)
        if monotonic() >= self._check_at:
            self._check()

    def _try(self, lane: _Lane, events: int = 0) -> None:
        """Do what `events` let, then send what waits and has room."""
        if lane.link.closed:  # by who looked at it while nothing was under way
            self._forget(lane)
            return
        try:
            if events & select.POLLOUT and lane.link.push_on():
                self._poll.modify(lane.descriptor, _IN)
                self._pushing.discard(lane)
            if events & ~select.POLLOUT:
                lane.link.pull()
                self._take(lane)
            if lane.waiting:
                self._send(lane)
        except NodeError as error:
            self._fail(lane, error)

    def _take(self, lane: _Lane) -> None:
        """Take all events that are here."""
        link = lane.link
        while True:
            try:
                event = link.next()
            except NodeRefused as error:
                self._fail(lane, error)
                if link.closed:
                    return
                continue
            if event is None:
                return
            if type(event) is Reply:
                self._answered(lane, event)

    def _answered(self, lane: _Lane, reply: Reply) -> None:
        part, taken = lane.owed[0], lane.link.bytes_taken
        job = part.job
        job.gathering.take(job, part.share, reply)
        job.count(part.share, reply, part.size, taken - lane.taken)
        lane.owed.popleft()
        lane.taken, lane.since = taken, monotonic()

    def _send(self, lane: _Lane) -> None:
        link = lane.link
        while lane.waiting and len(lane.owed) < WINDOW:
            part = lane.waiting.popleft()
            if not lane.owed:
                lane.since = monotonic()
                self._look_again(lane.since + SILENCE_S)
            lane.owed.append(part)
            job = part.job
            part.size = link.push(job.call.dispatch(part.share, job.dtype))
            if not job.sent:
                job.sent = perf_counter()
        if link.pushing:
            self._poll.modify(lane.descriptor, _IN_OUT)
            self._pushing.add(lane)

    def _push_all(self) -> None:
        """Until the nodes have all that they have nothing before, or take nothing more."""
        while any(len(lane.owed) == 1 for lane in self._pushing):
            before = self._pushed()
            self._look_again(monotonic() + PUSH_S)
            self._step()
            if self._pushed() == before:
                return

    def _pushed(self) -> int:
        return sum(lane.link.traffic[0] for lane in self._pushing)

    # Deadlines

    def _look_again(self, at: float) -> None:
        self._check_at = min(self._check_at, at)

    def _check(self) -> None:
        """Fail the links that are late, and set the time of the next look."""
        now, at = monotonic(), float("inf")
        for lane in list(self._lanes.values()):
            if lane.owed:
                due = self._due(lane)
                if now >= due:
                    lane.link.close()
                    self._fail(lane, self._late(lane, now))
                else:
                    at = min(at, due)
        for lane in self._lanes.values():
            for part in lane.owed:
                if part.job.gathering.over_at > now:
                    at = min(at, part.job.gathering.over_at)
        self._check_at = at

    def _due(self, lane: _Lane) -> float:
        due = min(lane.link.late_at(SILENCE_S, self._looked), lane.since + LIMIT_S)
        if lane.link.pushing and len(lane.owed) == 1:
            due = min(due, lane.since + SILENCE_S + lane.owed[0].size / SLOWEST)
        return due

    def _late(self, lane: _Lane, now: float) -> NodeTimeout:
        name = lane.link.name
        if now >= lane.since + LIMIT_S:
            problem = f"has worked on one dispatch for {LIMIT_S:g} s"
            return NodeTimeout(name, problem, "see what keeps it busy")
        problem = f"has sent nothing for {SILENCE_S:g} s"
        return NodeTimeout(name, problem, "see whether it and its network are up")

    # Failures

    def _fail(self, lane: _Lane, error: ExpertNetworkError) -> None:
        """What `error` ends: everything on the link if it is closed, else the oldest part's job."""
        over_at = monotonic() + GRACE_S
        if lane.link.closed:
            lost = [*lane.owed, *lane.waiting]
            self._forget(lane)
        else:
            lost = [lane.owed.popleft()] if lane.owed else []
            refused = {part.job for part in lost}
            lane.waiting = deque(part for part in lane.waiting if part.job not in refused)
            lane.since, lane.taken = monotonic(), lane.link.bytes_taken
        for part in lost:
            part.job.gathering.fail(part.job, error, over_at)
        self._look_again(over_at)

    def _end(self, gathering: Gathering) -> None:
        """Close the links on which this failed gathering is still owed something."""
        for lane in list(self._lanes.values()):
            if any(part.job.gathering is gathering for part in (*lane.owed, *lane.waiting)):
                lane.link.close()
                self._fail(lane, copy(gathering.failed[0]))

    # Links

    def _lane(self, link: Link) -> _Lane:
        lane = self._lanes.get(link.fileno())
        if lane is None or lane.link is not link:
            # A link that is opened anew may have the descriptor of one that was closed.
            lane = self._lanes[link.fileno()] = _Lane(link)
            self._poll.register(lane.descriptor, _IN)
        return lane

    def _forget(self, lane: _Lane) -> None:
        if self._lanes.get(lane.descriptor) is lane:
            del self._lanes[lane.descriptor]
            self._poll.unregister(lane.descriptor)
        self._pushing.discard(lane)
        lane.owed.clear()
        lane.waiting.clear()

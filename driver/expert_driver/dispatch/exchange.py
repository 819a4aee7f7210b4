"""All that is under way on the links of one network, sent and read as bytes go and come.

A node answers the dispatches of a link in their order, so each link has a queue of parts that are
owed. Nothing here waits for one link while another has something to say.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from time import monotonic, perf_counter

from expert_driver.dispatch.gathering import Gathering, Job
from expert_driver.dispatch.links import Link
from expert_driver.dispatch.pace import Pace
from expert_driver.dispatch.values import Floats
from expert_network.errors import Cancelled, ExpertNetworkError, NodeError, NodeTimeout
from expert_network.net.patience import Patience
from expert_network.net.stream import LATE_LOOK, SLOWEST
from expert_protocol.frames import Reply

SILENCE_S = 5.0  # without a frame from a node that owes one; a busy node says WORKING each second
LIMIT_S = 600.0  # for one part in all, however often the node says that it is working
GRACE_S = 0.5  # for the others to reply once a node has failed, so that the error comes within 1 s
WINDOW = 4  # parts of one link under way: one is computed while the next one travels
PUSH_S = 0.01  # without a byte taken, until what a node has no room for is left for later

_IN, _OUT = select.POLLIN, select.POLLOUT


class Exchange:
    """The dispatches under way. Used by one thread.

    When a link fails, every gathering that is owed something on it fails. `lost`: whether one has
    failed or was closed here; who opens it anew takes that back. `settle` is called before links
    are used, and `count` before figures are read: who used links otherwise hands over then.
    `looks`: whether `look` ever does.
    """

    def __init__(self) -> None:
        self._links: dict[int, Link] = {}  # by descriptor
        #: How long dispatches of a single row take; for who sees them to tell.
        self.pace = Pace()
        self._poll, self._patience = select.poll(), Patience()
        self.looks = self._patience.looks
        self._pushing: set[Link] = set()
        #: When deadlines are looked at next, and when what had come was last looked at anew.
        self._check_at = self._looked = 0.0
        self.lost = False
        #: Whether replies have been read here, whose epoch may be news; native code leaves those.
        self.read = True
        #: Who else owns what a late job of one row was asked for; None: it is waited for.
        self.rivals: Callable[[Job], Sequence[Job]] | None = None
        #: Who else is asked for what a job has not answered: no jobs, if nobody can be.
        self.reroute: Callable[[Job, ExpertNetworkError], Sequence[Job]] = lambda job, error: ()
        #: What is reported then.
        self.nowhere: Callable[[Job, ExpertNetworkError], ExpertNetworkError] = lambda job, error: (
            error
        )
        self.settle: Callable[[], None] = lambda: None
        self.count: Callable[[], None] = lambda: None

    def ask(self, gathering: Gathering) -> None:
        """Send all jobs, as far as the nodes have room for them."""
        self.settle()
        try:
            for job in list(gathering.jobs):  # one whose link ends makes more of them
                self._send(job)
            if self._pushing:
                self._push_all()
        except BaseException:
            self.abandon()
            raise

    def _send(self, job: Job) -> None:
        link = job.link
        if self._links.get(link.descriptor) is not link:
            self._add(link)
        for share in job.parts:
            link.waiting.append((job, share))
        self._send_some(link)

    def adopt(
        self, gathering: Gathering, since: float, sent: Sequence[int], came: Sequence[memoryview]
    ) -> None:
        """Go on with what was asked by other hands at `since`, each job in one part.

        `sent` bytes of its dispatch have gone for each job, and `came` has come.
        """
        gathering.asked = since
        for job, sent_of, came_of in zip(gathering.jobs, sent, came, strict=True):
            link, share = job.link, job.parts[0]
            if self._links.get(link.descriptor) is not link:
                self._add(link)
            frame = link.connection.dispatch(job.dispatch(share))
            size = link.stream.adopt(frame, sent_of, came_of, since)
            link.owed.append((job, share, size))
            link.since = since
            self._watch(link)
        for job in list(gathering.jobs):
            while not job.link.closed and self._take(job.link):
                pass

    def look(self) -> None:
        """Look whether something comes, for as long as that has been of use."""
        self._patience.look(self._poll)

    def wait(self, gathering: Gathering) -> Floats:
        """Take replies until none of these is owed; the values. Raises the first failure, soon.

        Links that still owe a reply then are closed, and all are that owe anything when an
        interrupt breaks this off.
        """
        try:
            # What has come by now came in time, however late we look: there is time to take it.
            self._looked = monotonic()
            self._check_at = self._looked + LATE_LOOK
            hedge_at = self._hedge_at(gathering)
            while gathering.owing and (not gathering.failed or monotonic() < gathering.over_at):
                if monotonic() >= hedge_at:
                    hedge_at = float("inf")
                    self._hedge(gathering)
                self._check_at = min(self._check_at, hedge_at)
                self._step()
            if self._pushing:
                self._push_all()
        except BaseException:
            self.abandon()
            raise
        if gathering.failed:
            self._end(gathering)
            raise gathering.failed[0]
        # Or every dispatch would leave a circle to the garbage collector.
        for job in gathering.jobs:
            job.gathering = None
        return gathering.values.made

    def hedges_after(self) -> float:
        """Seconds after which a row is asked of others too; infinite if never, or not known yet."""
        return self.pace.late if self.rivals is not None else float("inf")

    def _hedge_at(self, gathering: Gathering) -> float:
        single = all(len(job.parts) == len(job.parts[0].rows) == 1 for job in gathering.jobs)
        return gathering.asked + self.hedges_after() if single else float("inf")

    def _hedge(self, gathering: Gathering) -> None:
        """Ask others as well for what is late."""
        assert self.rivals is not None
        for job in list(gathering.jobs):
            if not job.done and job.rivals is None and (others := self.rivals(job)):
                gathering.hedge(job, others)
                for other in others:
                    self._send(other)

    def abandon(self) -> None:
        """Close every link on which something is owed."""
        self.settle()
        for link in list(self._links.values()):
            if link.owed or link.waiting:
                link.close()
                self._fail(link, Cancelled("the dispatch was given up"), final=True)

    # One turn

    def _step(self) -> None:
        if self.looks:
            self._patience.look(self._poll)
        left = self._check_at - monotonic()
        # Rounded up: poll counts whole milliseconds, and 0 would spin until the deadline.
        for descriptor, events in self._poll.poll(max(0, int(left * 1000) + 1)):
            link = self._links.get(descriptor)
            if link is None:
                continue
            if link.closed:  # by who looked at it while nothing was under way
                self._forget(link)
                continue
            if events & _OUT:
                self._push_on(link)
            if events & ~_OUT and not link.closed:
                self._read(link)
        if monotonic() >= self._check_at:
            self._check()

    def _read(self, link: Link) -> None:
        try:
            link.stream.pull()
        except NodeError as error:
            self._fail(link, error)
            return
        while self._take(link):
            pass

    def _take(self, link: Link) -> bool:
        """Take the events that are here; True if there may be more behind a refusal."""
        try:
            while (event := link.next()) is not None:
                if type(event) is Reply:
                    self._answered(link, event)
        except NodeError as error:
            self._fail(link, error)
            return not link.closed
        if link.waiting:
            self._send_some(link)
        return False

    def _answered(self, link: Link, reply: Reply) -> None:
        self.read = True
        job, share, size = link.owed[0]
        if job.gathering is not None:
            job.gathering.take(job, share, reply)
        taken = link.stream.bytes_taken
        job.count(share, reply, size, taken - link.taken)
        link.taken, link.since = taken, monotonic()
        link.owed.popleft()

    def _send_some(self, link: Link) -> None:
        """Send what waits and has room in the window."""
        waiting, owed = link.waiting, link.owed
        try:
            while waiting and len(owed) < WINDOW:
                job, share = waiting.popleft()
                if not owed:
                    link.since = monotonic()
                owed.append((job, share, 0))
                size = link.push(job.dispatch(share))
                owed[-1] = job, share, size
                if not job.sent:
                    job.sent = perf_counter()
        except NodeError as error:
            self._fail(link, error)
            return
        self._watch(link)

    def _watch(self, link: Link) -> None:
        """See to what the kernel has not taken."""
        if link.stream.pushing:
            self._poll.modify(link.descriptor, _IN | _OUT)
            self._pushing.add(link)

    def _push_on(self, link: Link) -> None:
        try:
            if link.stream.push_on():
                self._poll.modify(link.descriptor, _IN)
                self._pushing.discard(link)
        except NodeError as error:
            self._fail(link, error)

    def _push_all(self) -> None:
        """Until the nodes have all that they have nothing before, or take nothing more."""
        while any(len(link.owed) == 1 for link in self._pushing):
            before = self._pushed()
            self._check_at = monotonic() + PUSH_S
            self._step()
            if self._pushed() == before:
                return

    def _pushed(self) -> int:
        return sum(link.stream.bytes_sent for link in self._pushing)

    # Deadlines

    def _check(self) -> None:
        """Fail the links that are late, and set the time of the next look."""
        now = monotonic()
        at = now + SILENCE_S
        for link in list(self._links.values()):
            if not link.owed:
                continue
            due = self._due(link)
            if now >= due:
                late = self._late(link, now)
                link.close()
                self._fail(link, late)
                continue
            over = [job.gathering.over_at for job, _, _ in link.owed if job.gathering]
            at = min(at, due, *(over_at for over_at in over if over_at > now))
        self._check_at = at

    def _due(self, link: Link) -> float:
        silence = self._silence(link)
        due = min(link.stream.late_at(silence, self._looked), link.since + LIMIT_S)
        if link.stream.pushing and len(link.owed) == 1:
            due = min(due, link.since + silence + link.owed[0][2] / SLOWEST)
        return due

    def _silence(self, link: Link) -> float:
        """How long the node may say nothing while it owes its oldest part.

        SILENCE_S, or less where single rows are answered so fast that less means the same.
        """
        job, share, _ = link.owed[0]
        if len(share.rows) > 1 or job.adopt:
            return SILENCE_S
        return min(SILENCE_S, self.pace.silence)

    def _late(self, link: Link, now: float) -> NodeTimeout:
        if now >= link.since + LIMIT_S:
            problem = f"has worked on one dispatch for {LIMIT_S:g} s"
            return NodeTimeout(link.name, problem, "see what keeps it busy")
        problem = f"has sent nothing for {self._silence(link):.2g} s"
        return NodeTimeout(link.name, problem, "see whether it and its network are up")

    # Failures

    def _fail(self, link: Link, error: ExpertNetworkError, final: bool = False) -> None:
        """What `error` ends: everything on the link if it is closed, else the oldest part's job.

        It is asked of others, unless that is `final` or nobody can be.
        """
        # Links and jobs keep it: without its traceback, whose frames hold them and the whole pass.
        error = copy(error)
        if link.closed:
            link.failed = None if final else error
            lost = _jobs(link)
            self._forget(link)
        else:
            lost = [link.owed.popleft()[0]] if link.owed else []
            link.waiting = deque(part for part in link.waiting if part[0] not in lost)
            link.since, link.taken = monotonic(), link.stream.bytes_taken
        over_at = monotonic() + GRACE_S
        for job in lost:
            gathering = job.gathering
            if gathering is None or job.done:
                continue
            if job.rivals is not None:
                late = job.rivals.job
                gathering.withdraw(late)
                if job is not late:  # a rival that fails leaves all to whom it was to help
                    continue
            others = () if final or gathering.failed else self.reroute(job, error)
            if others:
                gathering.replace(job, others)
                for other in others:
                    self._send(other)
            else:
                gathering.fail(job, error if final else self.nowhere(job, error), over_at)
        self._check_at = min(self._check_at, over_at)

    def _end(self, gathering: Gathering) -> None:
        """Close the links on which this failed gathering is still owed something."""
        for link in list(self._links.values()):
            if any(job.gathering is gathering for job in _jobs(link)):
                link.close()
                self._fail(link, copy(gathering.failed[0]), final=True)

    # Links

    def _add(self, link: Link) -> None:
        # A link that is opened anew may have the descriptor of one that was closed.
        self._links[link.descriptor] = link
        self._poll.register(link.descriptor, _IN)

    def _forget(self, link: Link) -> None:
        self.lost = True
        if self._links.get(link.descriptor) is link:
            del self._links[link.descriptor]
            self._poll.unregister(link.descriptor)
        self._pushing.discard(link)
        link.owed.clear()
        link.waiting.clear()


def _jobs(link: Link) -> list[Job]:
    """Whose parts are under way on `link`, one by one."""
    return [*(owed[0] for owed in link.owed), *(waiting[0] for waiting in link.waiting)]

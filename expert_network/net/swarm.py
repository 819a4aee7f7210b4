"""Many blocks from several peers at once, each from whoever is free, kept as soon as verified.

A peer that dies, sends wrong bytes, or is slow while nothing else is left to do is named and left
out. What it had sent of a block is gone on with from another: a fault costs at most a block.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from time import monotonic

from expert_network import disk
from expert_network.errors import (
    DiskFull,
    ExpertNetworkError,
    NetworkMismatch,
    NodeError,
    NodeRefused,
    StoreCorrupt,
    StoreError,
)
from expert_network.net.auth import ClusterKey
from expert_network.net.blocks import Arriving, receive
from expert_network.net.control import SILENCE, TOTAL, ControlClient
from expert_network.progress import Progress, silent
from expert_network.store.manifest import MAX_MANIFEST, align
from expert_network.store.reader import Store
from expert_network.units import size

#: Blocks asked of one peer at a time, once it has sent a good one; one before.
IN_FLIGHT = 4
#: How often, in seconds, to look who is slow, and whether a peer that fetches itself has more now.
TICK_S, RETRY_S = 0.1, 1.0
#: How long nothing may come from peers that are fetching themselves.
PATIENCE_S = 20.0
#: A peer is slow if what it owes takes this many times as long as elsewhere, and so many seconds.
SLOW_TIMES, SLOW_S = 4, 1.5

_FETCHING = "fetching the blocks"
#: Of a peer that has no such block, or no manifest, as yet.
_NOT_YET = (404, 503)


@dataclass(frozen=True)
class SourceReport:
    """What one peer has given: blocks that were kept, bytes received, and why it was left out."""

    url: str
    blocks: int
    received: int
    dropped: str | None


@dataclass(frozen=True)
class Report:
    """What a fetch took. Bytes: `kept` in the store, `received` in all, so `wasted` twice."""

    blocks: int
    kept: int
    seconds: float
    sources: tuple[SourceReport, ...]

    @property
    def received(self) -> int:
        """Bytes that peers have sent."""
        return sum(source.received for source in self.sources)

    @property
    def wasted(self) -> int:
        """Bytes that were of no use, and fetched once more."""
        return self.received - self.kept


async def fetch_blocks(
    store: Store,
    wanted: Iterable[tuple[int, int]],
    urls: Sequence[str],
    key: ClusterKey | None,
    progress: Progress = silent,
    tell: Callable[[str], None] = lambda sentence: None,
    *,
    total: float = TOTAL,
    silence: float = SILENCE,
) -> Report:
    """Fetch those (layer, expert) that `store` lacks, and keep them in it.

    tell: given a sentence for each peer that is left out. total, silence: see ControlClient.
    Raises NetworkMismatch, naming a block, if no peer has it; DiskFull or StoreError. What was
    kept by then stays; the caller has it synced.
    """
    async with AsyncExitStack() as stack:
        clients = [ControlClient(url, key, total=total, silence=silence) for url in urls]
        sources = [_Source(await stack.enter_async_context(client)) for client in clients]
        return await _Swarm(store, list(wanted), sources, progress, tell).run()


@dataclass(eq=False)
class _Source:
    """One peer. admitted: whether it serves our model; None until it was asked. `absent`: the
    blocks that it did not have when it was asked."""

    client: ControlClient
    blocks: int = 0
    received: int = 0
    began: float = 0.0
    heard: float = 0.0
    admitted: bool | None = None
    dropped: str | None = None
    absent: set[Arriving] = field(default_factory=set)

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def rate(self) -> float:
        """Bytes a second from its first byte to its last."""
        return self.received / max(self.heard - self.began, 1e-3)

    def moved(self, count: int) -> None:
        if count > 0:
            self.heard = monotonic()
            self.began = self.began or self.heard
            self.received += count


@dataclass(eq=False)
class _Flight:
    """A block on its way: from whom, since when, and how much of it there was before."""

    source: _Source
    block: Arriving
    task: asyncio.Task[ExpertNetworkError | None]
    since: float = field(default_factory=monotonic)
    start: int = field(init=False)

    def __post_init__(self) -> None:
        self.start = self.block.got

    @property
    def rate(self) -> float:
        return max(self.block.got - self.start, 0) / max(monotonic() - self.since, 1e-3)


class _Swarm:
    """One fetch. Everything but hashing and writing happens on the event loop."""

    def __init__(
        self,
        store: Store,
        wanted: Sequence[tuple[int, int]],
        sources: Sequence[_Source],
        progress: Progress,
        tell: Callable[[str], None],
    ) -> None:
        self._store, self._sources, self._progress, self._tell = store, sources, progress, tell
        here = {layer: set(store.held(layer)) for layer in {layer for layer, _ in wanted}}
        self._missing = deque(at for at in wanted if at[1] not in here[at[0]])
        self._returned: deque[Arriving] = deque()
        self._flights: set[_Flight] = set()
        self._left = len(self._missing)
        self._total = sum(store.manifest.layer(layer).block_bytes for layer, _ in wanted)
        self._needed = sum(store.manifest.layer(layer).block_bytes for layer, _ in self._missing)
        self._kept = 0
        # Of each block, who has sent something of it.
        self._givers: dict[Arriving, set[_Source]] = {}
        self._gained = monotonic()
        self._news = asyncio.Event()

    async def run(self) -> Report:
        began = monotonic()
        self._check_space()
        self._tell_progress()
        blocks = self._left
        try:
            async with asyncio.TaskGroup() as group:
                for source in self._sources if self._left else ():
                    group.create_task(self._serve(source))
                group.create_task(self._watch())
        except* ExpertNetworkError as failed:
            raise _first(failed) from None
        if self._left:
            raise self._not_to_be_had()
        reports = (SourceReport(s.url, s.blocks, s.received, s.dropped) for s in self._sources)
        return Report(blocks, self._kept, monotonic() - began, tuple(reports))

    def _check_space(self) -> None:
        specs = (self._store.manifest.layer(layer) for layer, _ in self._missing)
        needed = sum(align(spec.block_bytes, 4096) for spec in specs)
        free = disk.free(self._store.path)
        if needed > free:
            raise DiskFull(self._store.path, needed, free)

    # --- one source

    async def _serve(self, source: _Source) -> None:
        """Take from one peer as long as there is something to take."""
        await self._admit(source)
        async with asyncio.TaskGroup() as group:
            for lane in range(IN_FLIGHT):
                group.create_task(self._lane(source, lane, group))

    async def _admit(self, source: _Source) -> None:
        """Wait until a peer has a manifest, and leave it out if that is another model's."""
        while self._left and not source.dropped:
            try:
                data = await source.client.get_bytes("/manifest", MAX_MANIFEST)
            except ExpertNetworkError as error:
                if not _not_yet(error):
                    return self._drop(source, _reason(error))
                source.admitted = False
                await self._wait(RETRY_S)
                continue
            digest = hashlib.sha256(data).hexdigest()
            if digest != self._store.digest:
                self._drop(source, f"it serves another model, whose manifest is {digest[:12]}")
            source.admitted = True
            return

    async def _lane(self, source: _Source, lane: int, group: asyncio.TaskGroup) -> None:
        while self._left and not source.dropped:
            # A peer that only ever sends wrong bytes costs one block, not one for each lane.
            block = self._take(source) if lane == 0 or source.blocks else None
            if block is not None:
                await self._bring(source, block, group)
                continue
            if source.blocks:
                self._drop_slow(source)
            await self._wait(TICK_S)

    def _take(self, source: _Source) -> Arriving | None:
        """A block that nobody is bringing, and that this peer may have."""
        for block in self._returned:
            if block not in source.absent:
                self._returned.remove(block)
                return block
        if not self._missing:
            return None
        layer, expert = self._missing.popleft()
        return Arriving(self._store.manifest.layer(layer), expert)

    async def _bring(self, source: _Source, block: Arriving, group: asyncio.TaskGroup) -> None:
        before = source.received
        flight = _Flight(source, block, group.create_task(_received(source, block)))
        self._flights.add(flight)
        await asyncio.wait({flight.task})
        if source.received > before:
            self._givers.setdefault(block, set()).add(source)
        error = None if flight.task.cancelled() else flight.task.result()
        whole = error is None and not block.rest
        if whole:
            error = await self._keep(source, block)
        self._flights.remove(flight)
        if error is not None or not whole:
            self._returned.appendleft(block)
        if error is not None and _not_yet(error):
            source.absent.add(block)
        elif error is not None:
            self._drop(source, _reason(error))
        self._tell_news()

    async def _keep(self, source: _Source, block: Arriving) -> ExpertNetworkError | None:
        """Verify and keep a block; what is held against the peer, if anything."""
        try:
            await asyncio.to_thread(self._store.keep, *block.at, block.data)
        except StoreCorrupt as error:
            # What another peer had sent before may be what is wrong: then it is asked for alone.
            alone = self._givers.pop(block) == {source}
            block.got = 0
            return error if alone else None
        self._givers.pop(block, None)
        source.blocks += 1
        self._left -= 1
        self._kept += block.spec.block_bytes
        self._gained = monotonic()
        self._tell_progress()
        return None

    # --- all sources

    def _drop(self, source: _Source, reason: str) -> None:
        if source.dropped:
            return
        source.dropped = reason
        self._tell(f"node {source.url} is left out: {reason}")
        for flight in self._flights:
            if flight.source is source:
                flight.task.cancel()
        self._tell_news()

    def _drop_slow(self, idle: _Source) -> None:
        """Leave out a peer that keeps all waiting for what `idle` would bring much sooner."""
        for slow in {flight.source for flight in self._flights} - {idle}:
            owed = [flight for flight in self._flights if flight.source is slow]
            rest, rate = sum(f.block.rest for f in owed), sum(f.rate for f in owed)
            if monotonic() - min(f.since for f in owed) < SLOW_S:
                continue
            if any(f.block in idle.absent for f in owed) or not rest:
                continue
            if rest > max(SLOW_S, SLOW_TIMES * rest / idle.rate) * rate:
                other = f"node {idle.url} sends {size(idle.rate)}/s"
                self._drop(slow, f"it sends {size(rate)}/s where {other}")

    async def _watch(self) -> None:
        """End the fetch when what is left is nowhere."""
        while self._left and (living := [s for s in self._sources if not s.dropped]):
            if self._stuck(living):
                fetching = [source for source in living if await self._is_fetching(source)]
                if not fetching or monotonic() - self._gained > PATIENCE_S:
                    raise self._not_to_be_had()
                await asyncio.sleep(RETRY_S)
                for source in fetching:
                    source.absent.clear()
            await self._wait(TICK_S)

    def _stuck(self, living: Sequence[_Source]) -> bool:
        admitted = [source for source in living if source.admitted]
        unasked = any(source.admitted is None for source in living)
        if self._flights or unasked or (self._missing and admitted):
            return False
        return all(set(self._returned) <= source.absent for source in admitted)

    async def _is_fetching(self, source: _Source) -> bool:
        try:
            health = await source.client.get_json("/health", statuses=(200, 503))
        except ExpertNetworkError:
            return False
        return isinstance(health, dict) and health.get("status") == "fetching"

    def _not_to_be_had(self) -> NetworkMismatch:
        first = self._returned[0].at if self._returned else self._missing[0]
        more = f" and {self._left - 1} more" if self._left > 1 else ""
        asked = "; ".join(f"{s.url}: {s.dropped or 'it has no such block'}" for s in self._sources)
        return NetworkMismatch(
            f"block ({first[0]}, {first[1]}){more} cannot be had from any peer ({asked}); start a "
            "node that holds it and run the same command again, it goes on from what has arrived."
        )

    def _tell_progress(self) -> None:
        self._progress(self._total - self._needed + self._kept, self._total, _FETCHING)

    def _tell_news(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _wait(self, seconds: float) -> None:
        """Until something has changed, at most so long."""
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            pass


async def _received(source: _Source, block: Arriving) -> ExpertNetworkError | None:
    try:
        await receive(source.client, block, source.moved)
    except ExpertNetworkError as error:
        return error
    return None


def _not_yet(error: ExpertNetworkError) -> bool:
    return isinstance(error, NodeRefused) and error.code in _NOT_YET


def _reason(error: ExpertNetworkError) -> str:
    """What happened, without the node or the file, which are known here, and without advice."""
    return error.problem if isinstance(error, NodeError | StoreError) else str(error)


def _first(group: BaseExceptionGroup[ExpertNetworkError]) -> ExpertNetworkError:
    """The first of the errors in a group, however deep."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, ExpertNetworkError)
    return error

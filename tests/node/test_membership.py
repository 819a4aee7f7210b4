"""expert_node.membership: who goes first, when a node flips, and how it catches up.

Blocks are moved by a made-up mover; other nodes are real HTTP servers of this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from expert_network.errors import NodeUnreachable, RosterError
from expert_node.membership import (
    Blocks,
    Conflict,
    Membership,
    Proposal,
    Times,
    blocks_of,
    read_order,
    wire,
)
from expert_roster.roster import Roster

MODEL, SHAPE = "ab" * 32, [(0, 8), (3, 8)]
AB = Roster.parse("a,b")
#: What would fall due by itself does not, within a test.
NEVER = Times(lease=600.0, grace=600.0, look=600.0)


def roster(text: str, epoch: int) -> Roster:
    return Roster(Roster.parse(text).nodes, 1, epoch)


def proposal(text: str = "a,b,c", epoch: int = 1, proposer: str = "ann", **urls: str) -> Proposal:
    return Proposal(MODEL, roster(text, epoch), proposer, urls)


@dataclass
class FakeMover:
    """Gains when `go` is set, one block of one byte after the other."""

    held: set[tuple[int, int]] = field(default_factory=set)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None
    drivers: int = 0
    fetched: int = 0

    def missing(self, blocks: Blocks) -> int:
        return len(pairs(blocks) - self.held)

    async def gain(self, blocks: Blocks, urls: Iterable[str], going: Callable[[int], bool]) -> None:
        for block in sorted(pairs(blocks) - self.held):
            await self.go.wait()
            if self.error is not None:
                raise self.error
            self.held.add(block)
            self.fetched += 1
            if not going(1):
                return

    async def release(self, kept: Callable[[], Blocks]) -> None:
        self.held &= pairs(kept())
        self.released.set()


def pairs(blocks: Blocks) -> set[tuple[int, int]]:
    return {(layer, expert) for layer, experts in blocks.items() for expert in experts.tolist()}


@dataclass
class Bench:
    """Node a of a,b, at work."""

    membership: Membership
    mover: FakeMover
    flips: list[int]

    @property
    def pending(self) -> Any:
        return self.membership.seat()["pending"]

    async def ready(self, asked: Proposal) -> None:
        """Propose it and wait for the end."""
        over = self.membership.propose(asked)
        assert over is not None
        self.mover.go.set()
        async with asyncio.timeout(10):
            await over.wait()


@asynccontextmanager
async def bench(
    name: str = "a", times: Times = NEVER, addresses: Mapping[str, str] | None = None
) -> AsyncIterator[Bench]:
    flips: list[int] = []
    mover = FakeMover(pairs(blocks_of(AB, name, SHAPE)))
    membership = Membership(
        name, MODEL, SHAPE, AB, mover, lambda r: flips.append(r.epoch), None, addresses, (), times
    )
    task = asyncio.create_task(membership.run())
    try:
        yield Bench(membership, mover, flips)
    finally:
        task.cancel()
        await asyncio.wait({task})
    assert task.cancelled()


async def until(condition: Callable[[], bool]) -> None:
    """Give the loop turns until `condition` holds."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0)


async def test_gain_then_flip() -> None:
    """A node serves the old roster until it is told to commit the one that it is ready for."""
    async with bench() as it:
        asked = proposal("a", 1)
        over = it.membership.propose(asked)
        assert over is not None and not over.is_set()
        await until(lambda: not it.mover.go.is_set() and it.pending["total"] > 0)
        with pytest.raises(Conflict, match="does not have all its blocks"):
            it.membership.commit(asked.order)
        await it.ready(asked)
        assert it.pending["ready"] and it.pending["done"] == it.pending["total"]
        assert it.membership.order == (0, AB.digest) and it.flips == []
        it.membership.commit(asked.order)
        it.membership.commit(asked.order)  # a proposer may ask twice
        assert (it.membership.order, it.flips, it.pending) == (asked.order, [1], None)
        assert it.membership.propose(asked) is None
        assert it.mover.held == pairs(blocks_of(asked.roster, "a", SHAPE))


async def test_lost_blocks_are_kept_for_a_while() -> None:
    """What a node loses it lets go when no driver has a link, or the grace is over."""
    for drivers, times in ((0, NEVER), (1, Times(lease=600, grace=0.05, look=600))):
        async with bench(times=times) as it:
            it.mover.drivers = drivers
            asked = proposal("b,c", 1)  # without a
            await it.ready(asked)
            assert it.mover.held
            it.membership.commit(asked.order)
            async with asyncio.timeout(10):
                await it.mover.released.wait()
            assert not it.mover.held
    async with bench() as it:
        it.mover.drivers = 1
        asked = proposal("b,c", 1)
        await it.ready(asked)
        it.membership.commit(asked.order)
        for _ in range(20):
            await asyncio.sleep(0)
        assert it.mover.held


async def test_who_goes_first() -> None:
    """Of two proposals the one of the higher epoch goes first, then that of the higher digest."""
    low, high = sorted(
        (proposal("a,b,c"), proposal("a,b,d", proposer="bob")), key=lambda p: p.order
    )
    async with bench() as it:
        first = it.membership.propose(low)
        it.membership.propose(high)
        assert first is not None and first.is_set()  # whoever waits is told
        assert it.pending["proposer"] == high.proposer
        with pytest.raises(Conflict, match=f"{high.proposer} is setting another roster"):
            it.membership.propose(low)
        it.membership.propose(proposal("a", 2))
        assert it.pending["epoch"] == 2


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (proposal("a,b,c", 0), "is at epoch 0 already"),
        (Proposal("cd" * 32, roster("a,b,c", 1), "ann", {}), "serves model abababababab"),
    ],
)
async def test_what_is_refused(asked: Proposal, words: str) -> None:
    """An epoch that is not later, or another model, is refused."""
    async with bench() as it:
        with pytest.raises(Conflict, match=words):
            it.membership.propose(asked)


async def test_cancel() -> None:
    """A proposal that is cancelled is forgotten with what was gained for it; a begun one is not."""
    async with bench() as it:
        before, asked = set(it.mover.held), proposal("a", 1)
        await it.ready(asked)
        assert it.mover.held > before
        it.membership.cancel((1, "00"))  # another one
        assert it.pending is not None
        it.membership.cancel(asked.order)
        async with asyncio.timeout(10):
            await it.mover.released.wait()
        assert it.pending is None and it.mover.held == before
        with pytest.raises(Conflict, match="was not proposed this roster"):
            it.membership.commit(asked.order)
        await it.ready(asked)
        it.membership.commit(asked.order)
        with pytest.raises(Conflict, match="has begun epoch 1"):
            it.membership.cancel(asked.order)


async def test_what_cannot_be_gained_is_said() -> None:
    """The proposer learns why a node cannot take its part, and the node serves on."""
    async with bench() as it:
        it.mover.error = NodeUnreachable("b", "is gone", "look for it")
        await it.ready(proposal("a", 1))
        assert it.pending["error"] == "node b is gone; look for it"
        assert not it.pending["ready"]
        it.mover.error = None
        await it.ready(proposal("a", 2))
        assert it.pending["ready"]


@asynccontextmanager
async def peer(name: str, serving: Roster) -> AsyncIterator[str]:
    """The URL of a node that serves this roster."""
    seat = {
        "node": name,
        "model_digest": MODEL,
        "roster": {**serving.to_wire(), "digest": serving.digest},
        "addresses": {},
        "fetched": 0,
        "pending": None,
    }

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(seat)

    app = web.Application()
    app.add_routes([web.get("/roster", answer)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


QUICK = Times(lease=0.0, grace=600.0, look=600.0)


async def test_a_silent_proposer() -> None:
    """Without a word from its proposer a proposal is given up, unless another node has begun it."""
    asked = roster("a", 1)
    for begun in (False, True):
        async with peer("b", asked if begun else AB) as url, bench(times=QUICK) as it:
            it.mover.go.set()
            it.membership.propose(Proposal(MODEL, asked, "ann", {"b": url}))
            await until(lambda: it.pending is None)
            assert it.flips == ([1] if begun else [])


async def test_a_late_node_follows() -> None:
    """A node that begins with an old roster gains and flips to the one that its peers serve."""
    later = roster("a,b,c", 5)
    async with peer("b", later) as url, bench(addresses={"b": url}) as it:
        it.mover.go.set()
        await until(lambda: bool(it.flips))
        assert it.membership.order == (5, later.digest)
        assert it.mover.held >= pairs(blocks_of(later, "a", SHAPE))


async def test_a_roster_of_a_command_line_is_not_followed() -> None:
    """Epoch 0 is nobody's decision: two command lines that differ are for a person to mend."""
    higher = max((roster("a,b,c", 0), roster("a,b,d", 0)), key=lambda r: r.digest)
    async with peer("b", higher) as url, bench(addresses={"b": url}) as it:
        for _ in range(50):
            await asyncio.sleep(0.001)
        assert it.flips == [] and it.pending is None


async def test_nobody_answers() -> None:
    """A node whose peers are gone serves on."""
    async with bench(addresses={"b": "http://127.0.0.1:1"}) as it:
        await it.ready(proposal("a", 1))
        assert it.pending["ready"]


def test_proposals_travel() -> None:
    """A proposal read from its JSON is the same; anything else is refused."""
    asked = proposal(a="http://a:8301")
    message = {
        "model": MODEL,
        "roster": wire(asked.roster),
        "proposer": "ann",
        "addresses": {"a": "http://a:8301"},
    }
    assert Proposal.read(message) == asked
    for change in (
        {"roster": None}, {"model": 3}, {"proposer": "x" * 300}, {"proposer": "\n"},
        {"addresses": {"a": "ftp://x"}}, {"addresses": [1]}, {"addresses": {"a": 1}},
    ):  # fmt: skip
        with pytest.raises(RosterError):
            Proposal.read({**message, **change})
    with pytest.raises(RosterError):
        Proposal.read([])


@pytest.mark.parametrize("message", [None, {}, {"epoch": "1", "digest": "a"}, {"epoch": True}])
def test_orders_are_read(message: Any) -> None:
    """What names no roster is refused."""
    assert read_order({"epoch": 1, "digest": "a"}) == (1, "a")
    with pytest.raises(RosterError):
        read_order(message)


def test_blocks_of_a_node_that_is_not_there() -> None:
    """A node that a roster does not name owns no block of any layer."""
    assert {layer: len(ids) for layer, ids in blocks_of(AB, "z", SHAPE).items()} == {0: 0, 3: 0}
    assert blocks_of(AB, "a", SHAPE)[0].dtype == np.intp

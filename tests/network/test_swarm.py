"""expert_network.net.swarm: blocks from several peers, whatever some of them do."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from expert_network import disk
from expert_network.errors import DiskFull, NetworkMismatch, NodeRefused, StoreCorrupt
from expert_network.net import swarm as module
from expert_network.net.auth import ClusterKey
from expert_network.net.blocks import fetch_block
from expert_network.net.control import ControlClient
from expert_network.net.swarm import Report, fetch_blocks
from expert_network.store.manifest import MANIFEST
from expert_network.store.reader import Store
from tests.support.peers import (
    Fault,
    Peer,
    cut_after,
    dripping,
    flipped,
    refuse,
    serving_store,
    stall_after,
)
from tests.support.servers import unused_port
from tests.support.small_disk import small_disk
from tests.support.stores import block, write_store

KEY = ClusterKey.from_text("0f" * 32)
EXPERTS = 12
ALL = [(layer, expert) for layer in (0, 1) for expert in range(EXPERTS)]
SIZE = len(block(0, 0))


def everywhere(fault: Fault) -> Mapping[str, Fault]:
    """That fault for every block."""
    return {f"/block/{layer}/{expert}": fault for layer, expert in ALL}


class Joining:
    """A whole store to serve from, and a sparse one to fetch into."""

    def __init__(self, folder: Path) -> None:
        self.whole, self.part = folder / "whole", folder / "part"
        write_store(self.whole, experts=EXPERTS)
        self.store = self.sparse(self.part)
        self.told: list[str] = []

    def sparse(self, path: Path, blocks: list[tuple[int, int]] | None = None) -> Store:
        """A sparse store with these blocks."""
        without = shutil.ignore_patterns("bin")
        shutil.copytree(self.whole, path, ignore=without, dirs_exist_ok=True)
        store = Store.open(path, blocks=False)
        store.make_room()
        for at in blocks or ():
            store.keep(*at, block(*at))
        return store

    async def fetch(
        self, *peers: Peer | str, wanted: list[tuple[int, int]] = ALL, **options: Any
    ) -> Report:
        """Fetch, and check that what is wanted is there and nothing else was moved."""
        urls = [peer if isinstance(peer, str) else peer.url for peer in peers]
        key = options.pop("key", None)
        report = await fetch_blocks(self.store, wanted, urls, key, tell=self.told.append, **options)
        assert all(self.store.read_block(*at) == block(*at) for at in wanted)
        assert self.store.verify() == []
        return report


@pytest.fixture
def joining(tmp_path: Path) -> Joining:
    return Joining(tmp_path)


async def test_each_block_once_from_all(joining: Joining) -> None:
    """Several peers share the work, each block is moved once, and nobody is blamed."""
    seen: list[tuple[int, int]] = []
    async with serving_store(joining.whole) as one, serving_store(joining.whole) as two:
        report = await joining.fetch(
            one, two, progress=lambda done, total, what: seen.append((done, total))
        )
    assert report.blocks == len(ALL) and report.wasted == 0 and joining.told == []
    assert all(source.blocks for source in report.sources)
    asked = [path for peer in (one, two) for path, _ in peer.asked if path != "/manifest"]
    assert sorted(asked) == sorted(everywhere(refuse))
    assert seen == sorted(seen) and seen[-1] == (SIZE * len(ALL), SIZE * len(ALL))


async def test_only_what_is_missing(joining: Joining) -> None:
    """What is there is not asked for again, and a store that has all asks nobody."""
    for at in ALL[3:]:
        joining.store.keep(*at, block(*at))
    async with serving_store(joining.whole) as peer:
        assert (await joining.fetch(peer)).blocks == 3
        peer.asked.clear()
        assert (await joining.fetch(peer)).blocks == 0
        assert peer.asked == []


async def test_with_the_key(joining: Joining) -> None:
    """With the cluster key every request is let in."""
    async with serving_store(joining.whole, KEY) as peer:
        await joining.fetch(peer, key=KEY)


@pytest.mark.parametrize("count", [1, 3])
async def test_wrong_bytes(joining: Joining, count: int) -> None:
    """A peer that sends wrong bytes is named; each wrong block costs itself and no more."""
    faults = dict(list(everywhere(flipped).items())[:count])
    async with (
        serving_store(joining.whole, faults=faults) as bad,
        serving_store(joining.whole) as good,
    ):
        report = await joining.fetch(bad, good)
    dropped = [source for source in report.sources if source.dropped]
    assert [source.url for source in dropped] == [bad.url] * len(dropped)
    assert report.wasted <= count * SIZE
    assert all(f"node {bad.url} is left out" in told for told in joining.told)
    assert all("came with bytes that are not its own" in told for told in joining.told)


async def test_always_wrong_bytes_cost_one_block(joining: Joining) -> None:
    """A peer that never sends a right block is asked for one."""
    async with (
        serving_store(joining.whole, faults=everywhere(flipped)) as bad,
        serving_store(joining.whole) as good,
    ):
        report = await joining.fetch(bad, good)
    assert report.wasted == SIZE and len(joining.told) == 1 and bad.url in joining.told[0]
    assert len([path for path, _ in bad.asked if path != "/manifest"]) == 1


async def test_a_peer_that_dies(joining: Joining) -> None:
    """What a peer sent of a block before it died is gone on with elsewhere."""
    async with (
        serving_store(joining.whole, faults=everywhere(cut_after(SIZE // 2))) as dying,
        serving_store(joining.whole) as good,
    ):
        report = await joining.fetch(dying, good, f"127.0.0.1:{unused_port()}")
    assert report.wasted == 0
    assert "refused the connection" in " ".join(joining.told)
    assert f"node {dying.url} is left out" in " ".join(joining.told)
    assert any(str(part).startswith("bytes=") for _, part in good.asked)


async def test_a_slow_peer(joining: Joining, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that keeps all waiting is named with its speed, and what it has sent counts."""
    monkeypatch.setattr(module, "SLOW_S", 0.3)
    async with (
        serving_store(joining.whole, faults=everywhere(dripping(0.05))) as slow,
        serving_store(joining.whole) as good,
    ):
        report = await joining.fetch(slow, good)
    assert report.wasted == 0 and len(joining.told) == 1
    assert f"node {slow.url} is left out: it sends" in joining.told[0]
    assert f"where node {good.url} sends" in joining.told[0]


async def test_a_slow_peer_that_is_alone(joining: Joining, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slowness is held against nobody where nobody is faster."""
    monkeypatch.setattr(module, "SLOW_S", 0.05)
    async with serving_store(joining.whole, faults=everywhere(dripping(0.01))) as slow:
        report = await joining.fetch(slow, wanted=ALL[:4])
    assert joining.told == [] and report.wasted == 0


async def test_a_silent_peer(joining: Joining) -> None:
    """A peer that falls silent in the middle is left at the deadline."""
    released = asyncio.Event()
    async with (
        serving_store(joining.whole, faults=everywhere(stall_after(1000, released))) as silent,
        serving_store(joining.whole) as good,
    ):
        report = await joining.fetch(silent, good, silence=0.3)
        released.set()
    assert report.wasted == 0 and "did not answer" in joining.told[0]


async def test_another_models_blocks(joining: Joining, tmp_path: Path) -> None:
    """A peer with another manifest is named and asked for no block."""
    write_store(tmp_path / "other", experts=EXPERTS, config={"model_type": "another"})
    async with serving_store(tmp_path / "other") as other, serving_store(joining.whole) as good:
        await joining.fetch(other, good)
    assert [path for path, _ in other.asked] == ["/manifest"]
    assert f"node {other.url} is left out: it serves another model" in joining.told[0]


async def test_a_block_that_nobody_has(joining: Joining, tmp_path: Path) -> None:
    """What is there is fetched; then the missing block is named, with what each peer said."""
    joining.sparse(tmp_path / "half", ALL[1:])
    async with serving_store(tmp_path / "half") as half:
        with pytest.raises(NetworkMismatch, match=r"block \(0, 0\) cannot be had from any peer"):
            await joining.fetch(half)
    assert joining.store.held(0) == list(range(1, EXPERTS))


async def test_nobody_is_there(joining: Joining) -> None:
    """When all are left out the sentence says what happened to each."""
    url = f"http://127.0.0.1:{unused_port()}"
    with pytest.raises(NetworkMismatch, match=rf"and 23 more cannot .*\({url}: .*refused"):
        await joining.fetch(url)


async def test_a_peer_that_is_fetching_itself(
    joining: Joining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that a fetching peer lacks is asked for again as long as it fetches."""
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    other = joining.sparse(tmp_path / "other", ALL[1:])

    async def health(request: web.Request, data: bytes) -> web.StreamResponse:
        other.keep(0, 0, block(0, 0))
        return web.json_response({"status": "fetching"}, status=503)

    async with serving_store(other.path, faults={"/health": health}) as peer:
        await joining.fetch(peer)
    assert joining.told == []


async def test_two_from_each_other(joining: Joining, tmp_path: Path) -> None:
    """Two that fetch from each other alone, a half each, both end with everything."""
    halves = [joining.sparse(tmp_path / str(n), ALL[n::2]) for n in (0, 1)]
    async with serving_store(halves[0].path) as one, serving_store(halves[1].path) as two:
        reports = await asyncio.gather(
            fetch_blocks(halves[0], ALL, [two.url], None),
            fetch_blocks(halves[1], ALL, [one.url], None),
        )
    assert [report.blocks for report in reports] == [len(ALL) // 2] * 2
    assert all(half.held(layer) == list(range(EXPERTS)) for half in halves for layer in (0, 1))


async def test_patience_ends(joining: Joining, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that wait for each other end with the block that both lack, and do not hang."""
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    monkeypatch.setattr(module, "PATIENCE_S", 0.2)

    async def health(request: web.Request, data: bytes) -> web.StreamResponse:
        return web.json_response({"status": "fetching"}, status=503)

    faults = {"/manifest": refuse, "/health": health}
    async with serving_store(joining.whole, faults=faults) as peer:
        with pytest.raises(NetworkMismatch, match=r"block \(0, 0\) and 23 more cannot be had"):
            await joining.fetch(peer)


async def test_disk_full_before(joining: Joining, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit is refused before a block is asked for."""
    monkeypatch.setattr(disk, "free", lambda path: 1000)
    async with serving_store(joining.whole) as peer:
        with pytest.raises(DiskFull, match=r"is needed and 1\.0 KB is free"):
            await joining.fetch(peer)
    assert peer.asked == []


async def test_disk_full_meanwhile(
    joining: Joining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fills up is DiskFull, and what is verified by then is kept."""
    monkeypatch.setattr(module._Swarm, "_check_space", lambda self: None)
    room = 30 * 4096 + (joining.whole / MANIFEST).stat().st_size
    with small_disk(tmp_path / "disk", room) as small:
        joining.store = joining.sparse(small)
        async with serving_store(joining.whole) as peer:
            with pytest.raises(DiskFull):
                await joining.fetch(peer)
        held = joining.store.held(0)
        assert held and all(joining.store.read_block(0, e) == block(0, e) for e in held)


async def test_cancelled(joining: Joining) -> None:
    """Ctrl-C leaves a store that says what it has, and no task."""
    released = asyncio.Event()
    begun = asyncio.Event()
    faults = everywhere(stall_after(1000, released))
    for at in ALL[:5]:
        del faults[f"/block/{at[0]}/{at[1]}"]  # type: ignore[attr-defined]
    before = len(asyncio.all_tasks())
    async with serving_store(joining.whole, faults=faults) as peer:

        def progress(done: int, total: int, what: str) -> None:
            if done:
                begun.set()

        task = asyncio.create_task(fetch_blocks(joining.store, ALL, [peer.url], None, progress))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        released.set()
    assert joining.store.verify() == [] and joining.store.held(0)
    assert len(asyncio.all_tasks()) <= before + 1


# One block


async def test_one_block(joining: Joining, tmp_path: Path) -> None:
    """One block comes from the first peer that has it whole and right."""
    joining.sparse(tmp_path / "none")
    spec = joining.store.manifest.layer(0)
    async with AsyncExitStack() as stack:
        bad = await stack.enter_async_context(
            serving_store(joining.whole, faults=everywhere(flipped))
        )
        none = await stack.enter_async_context(serving_store(tmp_path / "none"))
        good = await stack.enter_async_context(serving_store(joining.whole))
        clients = [
            await stack.enter_async_context(ControlClient(peer.url)) for peer in (bad, none, good)
        ]
        assert await fetch_block(clients, spec, 4) == block(0, 4)
        with pytest.raises(StoreCorrupt, match=rf"block \(0, 4\) node {bad.url} sent bytes"):
            await fetch_block(clients[:2], spec, 4)
        with pytest.raises(NodeRefused):
            await fetch_block(clients[1:2], spec, 4)

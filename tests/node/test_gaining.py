"""expert_node.gaining: blocks that come and go under a node that answers."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from expert_network import disk
from expert_network.backend import detect
from expert_network.errors import NetworkMismatch, OutOfMemory
from expert_network.experts.partition import load_partition
from expert_network.store.reader import Store
from expert_node import gaining
from expert_node.compute import Computer
from expert_node.gaining import Gaining
from expert_node.links import Links
from expert_node.membership import Blocks
from expert_node.metrics import Counters
from tests.support.node_here import node_here
from tests.support.wire import welcome


@pytest.fixture(scope="module")
def peer(store: Store) -> Iterator[str]:
    """The URL of a node that has every block."""
    with node_here("a", "a", store.path) as node:
        yield node.url


@pytest.fixture
def part(store: Store, tmp_path: Path) -> Store:
    """A sparse copy of `store` without blocks."""
    shutil.copytree(store.path, tmp_path / "part", ignore=shutil.ignore_patterns("bin"))
    Store.open(tmp_path / "part", blocks=False).make_room()
    return Store.open(tmp_path / "part")


def mover(store: Store) -> tuple[Gaining, Computer]:
    """A node that holds nothing yet."""
    manifest, counters = store.manifest, Counters()
    partition = load_partition(store, {}, detect())
    computer = Computer("d", partition, manifest.shape, counters)
    links = Links(welcome(), "x", computer, counters, lambda layer: manifest.layer(layer).hidden)
    return Gaining(store, partition, computer, links, "mlx-cpu", None), computer


WANTED: Blocks = {0: np.array([1, 5]), 1: np.array([0, 2, 7])}
NOTHING: Blocks = {0: np.array([], np.intp), 1: np.array([], np.intp)}


def held(computer: Computer) -> dict[int, list[int]]:
    return {
        n: np.flatnonzero(computer.held[place]).tolist() for n, place in computer.layers.items()
    }


def counting(told: list[int]) -> Callable[[int], bool]:
    """Keep what is told, and go on."""

    def going(count: int) -> bool:
        told.append(count)
        return True

    return going


def test_gain_and_release(peer: str, part: Store) -> None:
    """Blocks come from a peer, are answered for, stand on the disk, and leave both again."""
    moving, computer = mover(part)
    size = part.manifest.layer(0).block_bytes
    told: list[int] = []
    empty = disk.sizes(part.path)[1]
    assert moving.missing(WANTED) == 5 * size

    async def gain() -> None:
        await moving.gain(WANTED, [peer], counting(told))

    asyncio.run(gain())
    assert held(computer) == {0: [1, 5], 1: [0, 2, 7]}
    assert (moving.missing(WANTED), moving.fetched, sum(told)) == (0, 5 * size, 5 * size)
    assert Store.open(part.path).held(1) == [0, 2, 7]
    asyncio.run(moving.release(lambda: {0: np.array([5]), 1: np.array([], np.intp)}))
    assert held(computer) == {0: [5], 1: []}
    assert (part.held(0), part.held(1)) == ([5], [])
    asyncio.run(moving.release(lambda: NOTHING))
    assert disk.sizes(part.path)[1] <= empty + 2 * 4096


def test_what_is_on_the_disk_is_not_fetched(store: Store) -> None:
    """A node with a whole store gains from it, and gives nothing of it up."""
    moving, computer = mover(store)
    told: list[int] = []
    asyncio.run(moving.gain(WANTED, ["http://127.0.0.1:1"], counting(told)))
    assert held(computer) == {0: [1, 5], 1: [0, 2, 7]}
    assert (moving.fetched, sum(told)) == (0, 5 * store.manifest.layer(0).block_bytes)
    asyncio.run(moving.release(lambda: NOTHING))
    assert held(computer) == {0: [], 1: []} and len(store.held(0)) == 8


def test_nobody_has_them(part: Store) -> None:
    """A block that is nowhere to be had is named, and nothing is answered for."""
    moving, computer = mover(part)
    with pytest.raises(NetworkMismatch, match=r"block \(0, 1\) and 4 more cannot be had"):
        asyncio.run(moving.gain(WANTED, ["http://127.0.0.1:1"], lambda count: True))
    assert held(computer) == {0: [], 1: []}


def test_too_little_memory(peer: str, part: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would not fit is not fetched."""
    monkeypatch.setattr(gaining, "available_memory", lambda backend: 1000)
    moving, _ = mover(part)
    with pytest.raises(OutOfMemory, match="what the new roster gives node d needs"):
        asyncio.run(moving.gain(WANTED, [peer], lambda count: True))
    assert moving.fetched == 0
    asyncio.run(moving.gain(NOTHING, [peer], lambda count: True))


def test_it_ends_when_it_is_not_wanted(peer: str, part: Store) -> None:
    """A roster that was given up is not gained to the end, and that is no error."""
    moving, computer = mover(part)
    asyncio.run(moving.gain(WANTED, [peer], lambda count: False))
    assert held(computer) == {0: [], 1: []}

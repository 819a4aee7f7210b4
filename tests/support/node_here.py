"""A node's HTTP in this process, over real blocks, for tests that reach into its memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from expert_network.backend import detect
from expert_network.experts.partition import Partition, load_partition
from expert_network.store.reader import Store
from expert_node.compute import Computer
from expert_node.control import application
from expert_node.gaining import Gaining
from expert_node.links import Links
from expert_node.membership import Membership
from expert_node.startup import Startup
from expert_node.state import NodeState, Phase, Serving
from expert_roster.rendezvous import partition
from expert_roster.roster import Roster
from tests.support.wire import welcome


@dataclass(frozen=True)
class NodeHere:
    """Where it listens, and what it computes with."""

    url: str
    partition: Partition

    def memory(self, layer: int, expert: int) -> NDArray[np.uint8]:
        """The bytes of one block's first tensor, as they lie in memory: writable."""
        resident = self.partition._parts[layer][0]._resident  # type: ignore[attr-defined]
        stack = next(iter(resident._bytes.values()))
        slot = int(resident.slots(np.array([expert]))[0])
        view: NDArray[np.uint8] = np.asarray(stack)[slot]
        assert np.shares_memory(view, np.asarray(stack))
        return view


@contextmanager
def node_here(roster: str, me: str, path: Path) -> Iterator[NodeHere]:
    """Node `me` of `roster` with the blocks of the store at `path`, on a free port."""
    state = _loaded(Roster.parse(roster), me, Store.open(path))
    assert state.serving is not None
    loop, url = asyncio.new_event_loop(), Future[str]()
    ended = asyncio.Event()

    async def serve() -> None:
        runner = web.AppRunner(application(state, None), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url.set_result(f"http://127.0.0.1:{runner.addresses[0][1]}")
        await ended.wait()
        await runner.cleanup()

    thread = Thread(target=lambda: loop.run_until_complete(serve()), name="node here")
    thread.start()
    try:
        yield NodeHere(url.result(10), state.serving.partition)
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(10)
        loop.close()


def _loaded(roster: Roster, me: str, store: Store) -> NodeState:
    blocks = partition(roster, me, store.manifest.shape)
    state = NodeState(Startup(me, roster, store, blocks))
    held = load_partition(store, blocks, detect())
    computer = Computer(me, held, store.manifest.shape, state.counters)
    links = Links(
        welcome(node=me),
        store.manifest.model_type,
        computer,
        state.counters,
        lambda layer: store.manifest.layer(layer).hidden,
    )
    gaining = Gaining(store, held, computer, links, "mlx-cpu", None)
    membership = Membership(me, store.digest, store.manifest.shape, roster, gaining, state.flipped)
    state.serving, state.phase = Serving(held, links, membership), Phase.OK
    return state

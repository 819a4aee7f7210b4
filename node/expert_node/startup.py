"""What is settled before a byte is loaded: roster, store, this node's blocks, the memory."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from expert_network import places
from expert_network.commandline import progress
from expert_network.errors import OutOfMemory, StoreError
from expert_network.net.fetch import fetch_store, fetch_trunk
from expert_network.net.pinning import Confirm, pinned
from expert_network.store.reader import Store, not_held
from expert_network.units import size
from expert_node.config import NodeConfig
from expert_node.joining import invitation
from expert_node.stopping import in_thread
from expert_roster.rendezvous import partition
from expert_roster.roster import Roster

log = logging.getLogger("expert_node")

#: What serving takes besides the blocks: MLX's buffers, frames, one chunk of up-cast weights.
SERVING_BYTES = 200_000_000


@dataclass(frozen=True)
class Startup:
    """A node that may start: `blocks` lists its experts by layer, every layer present."""

    name: str
    roster: Roster
    store: Store
    blocks: Mapping[int, NDArray[np.intp]]
    #: Where other nodes are, by name, as far as that is known.
    addresses: Mapping[str, str] = field(default_factory=dict)

    @property
    def block_count(self) -> int:
        """How many blocks this node owns."""
        return sum(len(experts) for experts in self.blocks.values())


def read(config: NodeConfig) -> Startup:
    """Read roster and store. Raises RosterError, StoreError and their kin.

    With --join the network is asked for both, and the node begins without blocks; raises what it
    fails with, then.
    """
    if config.join is not None:
        return asyncio.run(_invited(config, config.join))
    roster = read_roster(config)
    settled = settle(config.me, roster, Store.open(store_path(config)))
    for layer, expert in missing(settled):
        raise not_held(settled.store.path, layer, expert)
    return settled


def read_roster(config: NodeConfig) -> Roster:
    """The roster, which names this node. Raises RosterError."""
    assert config.roster is not None
    roster = Roster.from_spec(config.roster, _read_text, config.replicas)
    roster.index(config.me)
    return roster


def settle(me: str, roster: Roster, store: Store) -> Startup:
    """What node `me` owns of an opened store, whether it is there or not."""
    store.recheck()
    return Startup(me, roster, store, partition(roster, me, store.manifest.shape))


def missing(settled: Startup) -> list[tuple[int, int]]:
    """The (layer, expert) of the node's own blocks that its store lacks."""
    held = {layer: set(settled.store.held(layer)) for layer in settled.blocks}
    return [(n, e) for n, ids in settled.blocks.items() for e in ids.tolist() if e not in held[n]]


async def _invited(config: NodeConfig, join: str) -> Startup:
    """What a node that joins begins with: a store without blocks, unless they are there already."""
    invited = await invitation([url.strip() for url in join.split(",")], config.key, config.me)
    home, urls = places.home(config.home), list(invited.addresses.values())
    if config.store is None:
        path = places.cache_dir(home) / invited.model_digest
    else:
        path = places.place_for(config.store, home)
    digest = await pinned(path, config.manifest_sha256, urls, config.key, confirm(), log.warning)
    if digest != invited.model_digest:
        problem = f"the manifest {digest[:12]} is not the network's, {invited.model_digest[:12]}"
        raise StoreError(path, problem, "name another folder, or leave --manifest-sha256 out")
    with progress() as report:
        store = Store.open(await fetch_store(urls, path, config.key, digest, report, part=True))
        if not (config.no_trunk or store.trunk_path.exists()):
            await fetch_trunk(store, urls, config.key, report)
    start = invited.without(config.me)
    return Startup(config.me, start.roster, store, {}, start.addresses)


def confirm() -> Confirm | None:
    """How to ask who sits at the terminal; None without one."""

    async def ask(question: str) -> bool:
        return await in_thread(partial(click.confirm, question, err=True))

    return ask if sys.stdin.isatty() and sys.stderr.isatty() else None


def check_memory(startup: Startup, partition_bytes: int, available: int) -> None:
    """Raise OutOfMemory if the blocks, and what serving takes, do not fit `available` bytes."""
    needed = partition_bytes + SERVING_BYTES
    if not partition_bytes or needed <= available:
        return
    what = (
        f"the partition of node {startup.name} ({startup.block_count} blocks, "
        f"{size(partition_bytes)}, and {size(SERVING_BYTES)} to work with)"
    )
    advice = "give the node a smaller weight in the roster, or add nodes to it"
    raise OutOfMemory(what, needed, available, advice)


def _read_text(path: str) -> str:
    return Path(path).expanduser().read_text(encoding="utf-8")


def store_path(config: NodeConfig) -> Path:
    """Where the store is or, with peers to fetch it from, will be. Raises StoreError."""
    home = places.home(config.home)
    if config.store is None:
        return places.only_store(home)
    if config.peers:
        return places.place_for(config.store, home)
    return places.find_store(config.store, home)

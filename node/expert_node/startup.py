"""What is settled before a byte is loaded: roster, store, this node's blocks, the memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from expert_network import places
from expert_network.errors import OutOfMemory
from expert_network.store.reader import Store, not_held
from expert_network.units import size
from expert_node.config import NodeConfig
from expert_roster.rendezvous import partition
from expert_roster.roster import Roster

#: What serving takes besides the blocks: MLX's buffers, frames, one chunk of up-cast weights.
SERVING_BYTES = 200_000_000


@dataclass(frozen=True)
class Startup:
    """A node that may start: `blocks` lists its experts by layer, every layer present."""

    name: str
    roster: Roster
    store: Store
    blocks: Mapping[int, NDArray[np.intp]]

    @property
    def block_count(self) -> int:
        """How many blocks this node owns."""
        return sum(len(experts) for experts in self.blocks.values())


def read(config: NodeConfig) -> Startup:
    """Read roster and store. Raises RosterError, StoreError and their kin."""
    roster = read_roster(config)
    settled = settle(config.me, roster, Store.open(store_path(config)))
    for at in missing(settled):
        raise not_held(settled.store.path, *at)
    return settled


def read_roster(config: NodeConfig) -> Roster:
    """The roster, which names this node. Raises RosterError."""
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

"""What is settled before a byte is loaded: roster, store, this node's blocks, the memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from expert_network import places
from expert_network.commandline import progress
from expert_network.errors import OutOfMemory
from expert_network.net.fetch import fetch_store
from expert_network.store.reader import Store
from expert_network.units import size
from expert_node.config import NodeConfig
from expert_node.joining import invitation
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
    assert config.roster is not None
    roster = Roster.from_spec(config.roster, _read_text, config.replicas)
    roster.index(config.me)
    store = Store.open(_store_path(config))
    return Startup(config.me, roster, store, partition(roster, config.me, store.manifest.shape))


async def _invited(config: NodeConfig, join: str) -> Startup:
    """What a node that joins begins with."""
    urls = [url.strip() for url in join.split(",")]
    invited = await invitation(urls, config.key, config.me)
    digest, home = invited.model_digest, places.home(config.home)
    path = places.cache_dir(home) / digest if config.store is None else _folder(config.store)
    with progress() as report:
        await fetch_store(list(invited.addresses.values()), path, config.key, digest, report)
    start, store = invited.without(config.me), Store.open(path, blocks=False)
    store.make_room()
    return Startup(config.me, start.roster, store, {}, start.addresses)


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


def _folder(path: str) -> Path:
    return Path(path).expanduser()


def _read_text(path: str) -> str:
    return Path(path).expanduser().read_text(encoding="utf-8")


def _store_path(config: NodeConfig) -> Path:
    home = places.home(config.home)
    return (
        places.only_store(home) if config.store is None else places.find_store(config.store, home)
    )

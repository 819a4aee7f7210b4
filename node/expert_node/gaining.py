"""Blocks that come and go while a node answers: by its disk into the partition, and out of both."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from expert_network.errors import Cancelled, OutOfMemory
from expert_network.experts.partition import Block, Partition, partition_bytes
from expert_network.memory import available_memory
from expert_network.net.auth import ClusterKey
from expert_network.net.swarm import fetch_blocks
from expert_network.store.reader import Store
from expert_node.compute import Computer
from expert_node.links import Links
from expert_node.membership import Blocks
from expert_node.stopping import in_thread

log = logging.getLogger("expert_node")

Ids = NDArray[np.intp]
Going = Callable[[int], bool]


class Gaining:
    """Implements Mover for one node. Used on the event loop."""

    def __init__(
        self,
        store: Store,
        partition: Partition,
        computer: Computer,
        links: Links,
        backend: str,
        key: ClusterKey | None,
    ) -> None:
        self._store, self._partition, self._computer = store, partition, computer
        self._links, self._backend, self._key = links, backend, key
        self.fetched = 0

    @property
    def drivers(self) -> int:
        """Links that are open."""
        return len(self._links)

    def missing(self, blocks: Blocks) -> int:
        """Bytes of those that are not held."""
        return partition_bytes(self._store.manifest, self._missing(blocks))

    async def gain(self, blocks: Blocks, urls: Iterable[str], going: Going) -> None:
        """See Mover. First all are on the disk, then one layer after the other in memory."""
        missing = self._missing(blocks)
        self._check_memory(missing)
        try:
            if self._store.partial:
                await self._fetch(missing, urls, going)
            for layer, experts in missing.items():
                held = np.union1d(self._partition.owned(layer), experts)
                read = partial(self._store.read_block, layer)
                await in_thread(partial(self._fit, layer, held, read))
                there = 0 if self._store.partial else len(experts)
                _go_on(going, there * self._store.manifest.layer(layer).block_bytes)
        except Cancelled as end:
            log.info("no more blocks are taken: %s", end)

    async def release(self, kept_now: Callable[[], Blocks]) -> None:
        """See Mover."""
        for layer, _ in self._store.manifest.shape:
            held = self._partition.owned(layer)
            kept = np.intersect1d(held, kept_now()[layer])
            if len(kept) < len(held) or self._partition.scattered(layer):
                await in_thread(partial(self._fit, layer, kept))
                log.info("%d blocks of layer %d are let go", len(held) - len(kept), layer)
            if self._store.partial:
                lost = np.setdiff1d(self._store.held(layer), kept).tolist()
                await asyncio.to_thread(self._store.drop, layer, lost)

    def _missing(self, blocks: Blocks) -> dict[int, Ids]:
        missing = {
            layer: np.setdiff1d(experts, self._partition.owned(layer))
            for layer, experts in blocks.items()
        }
        return {layer: experts for layer, experts in missing.items() if len(experts)}

    def _check_memory(self, missing: Blocks) -> None:
        """Raise OutOfMemory unless there is room: for the blocks, and one layer twice."""
        if not missing:
            return
        manifest = self._store.manifest
        layers = {
            layer: np.union1d(self._partition.owned(layer), experts)
            for layer, experts in missing.items()
        }
        largest = max(partition_bytes(manifest, {layer: ids}) for layer, ids in layers.items())
        needed = partition_bytes(manifest, missing) + largest
        available = available_memory(self._backend)
        if needed > available:
            what = f"what the new roster gives node {self._computer.node}"
            raise OutOfMemory(what, needed, available, "give the node a smaller weight")

    async def _fetch(self, missing: Mapping[int, Ids], urls: Iterable[str], going: Going) -> None:
        """Have blocks on the disk, from whoever has them."""
        wanted = [(layer, e) for layer, experts in missing.items() for e in experts.tolist()]
        known = 0

        def heard(done: int, total: int, what: str) -> None:
            nonlocal known
            count, known = done - known, done
            _go_on(going, count)

        report = await fetch_blocks(
            self._store, wanted, list(urls), self._key, heard, partial(log.warning, "%s")
        )
        self.fetched += report.received
        await asyncio.to_thread(self._store.sync)

    def _fit(self, layer: int, experts: Ids, read: Callable[[int], Block] | None = None) -> None:
        """Make the partition hold `experts` of a layer. In a thread of its own."""
        partition, spec = self._partition, self._store.manifest.layer(layer)
        made = partition.fitted(spec, experts, read)
        self._computer.change(layer, experts, partial(partition.put, spec, made))


def _go_on(going: Going, count: int) -> None:
    if not going(count):
        raise Cancelled("the roster is not wanted any more")

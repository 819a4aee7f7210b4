"""Blocks that come and go while a node answers: from its disk or its peers into the partition."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial

import numpy as np
from numpy.typing import NDArray

from expert_network.errors import (
    ExpertNetworkError,
    KeyRefused,
    NodeError,
    NodeRefused,
    OutOfMemory,
    StoreCorrupt,
    StoreError,
)
from expert_network.experts.partition import Block, Partition, partition_bytes
from expert_network.memory import available_memory
from expert_network.net.auth import ClusterKey
from expert_network.net.control import ControlClient
from expert_network.store.manifest import LayerSpec
from expert_network.store.reader import Store
from expert_node.compute import Computer
from expert_node.links import Links
from expert_node.membership import Blocks
from expert_node.stopping import in_thread
from expert_roster.rendezvous import owners
from expert_roster.roster import Roster

log = logging.getLogger("expert_node")

#: Blocks under way at a time; each is whole in memory until its layer is.
AT_ONCE = 4
_LEAVE_OUT = "leave that node out, and verify its store with `expert-net verify`"

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

    async def gain(
        self, blocks: Blocks, roster: Roster, addresses: Mapping[str, str], going: Going
    ) -> None:
        """See Mover. Layer by layer: what has been gained when it ends is held."""
        missing = self._missing(blocks)
        self._check_memory(missing)
        async with AsyncExitStack() as stack:
            clients = {
                name: await stack.enter_async_context(ControlClient(url, self._key))
                for name, url in addresses.items()
            }
            sources = _Sources(self._store, roster, clients)
            for layer, experts in missing.items():
                found = await self._take(sources, layer, experts, going)
                if found is None:
                    return
                held = np.union1d(self._partition.owned(layer), experts)
                await in_thread(partial(self._fit, layer, held, found))
        if self._store.partial:
            await asyncio.to_thread(self._store.sync)

    async def release(self, kept_now: Callable[[], Blocks]) -> None:
        """See Mover."""
        for layer, _ in self._store.manifest.shape:
            held = self._partition.owned(layer)
            kept = np.intersect1d(held, kept_now()[layer])
            if len(kept) < len(held) or self._partition.scattered(layer):
                await in_thread(partial(self._fit, layer, kept, {}))
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

    async def _take(
        self, sources: _Sources, layer: int, experts: Ids, going: Going
    ) -> dict[int, Block] | None:
        """The blocks of one layer; None if that was ended."""
        found: dict[int, Block] = {}
        waiting, ended = list(reversed(experts.tolist())), False

        async def work() -> None:
            nonlocal ended
            while waiting and not ended:
                expert = waiting.pop()
                data, came = await sources.block(layer, expert)
                if came and self._store.partial:
                    await asyncio.to_thread(self._store.keep, layer, expert, data)
                found[expert] = data
                self.fetched += came
                ended = ended or not going(len(found[expert]))

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(AT_ONCE):
                    group.create_task(work())
        except* ExpertNetworkError as errors:
            raise errors.exceptions[0] from None
        return None if ended else found

    def _fit(self, layer: int, experts: Ids, more: Mapping[int, Block]) -> None:
        """Make the partition hold `experts` of a layer. In a thread of its own."""
        partition, spec = self._partition, self._store.manifest.layer(layer)
        made = partition.fitted(spec, experts, more)
        self._computer.change(layer, experts, partial(partition.put, spec, made))


class _Sources:
    """The disk, and the peers that may still be asked."""

    def __init__(self, store: Store, roster: Roster, clients: Mapping[str, ControlClient]) -> None:
        self._store, self._roster, self._clients = store, roster, dict(clients)
        self._failed: list[ExpertNetworkError] = []

    async def block(self, layer: int, expert: int) -> tuple[Block, int]:
        """A block, verified, and how many bytes of it came from a peer.

        Raises StoreCorrupt if a peer sent something wrong, else what the first of them failed with.
        """
        try:
            return await asyncio.to_thread(self._store.read_block, layer, expert), 0
        except StoreError as error:
            absent = error
        spec, missing = self._store.manifest.layer(layer), list[ExpertNetworkError]()
        for name in self._order(layer, expert):
            client = self._clients.get(name)
            if client is None:
                continue
            try:
                data = await _fetched(client, spec, expert)
                return data, len(data)
            except (NodeError, KeyRefused, StoreCorrupt) as error:
                if isinstance(error, NodeRefused) and error.code == 404:
                    missing.append(error)  # it may have the next one
                    continue
                log.warning("node %s is no source any more: %s", name, error)
                self._failed.append(error)
                self._clients.pop(name, None)
        corrupt = [error for error in self._failed if isinstance(error, StoreCorrupt)]
        raise (corrupt or self._failed or missing or [absent])[0]

    def _order(self, layer: int, expert: int) -> Sequence[str]:
        """Whom to ask first: the block's owners, then whoever may have a store."""
        chosen = owners(self._roster, np.array([layer]), np.array([expert]))[0]
        first = [self._roster.names[index] for index in chosen]
        return [*first, *(name for name in self._clients if name not in first)]


async def _fetched(client: ControlClient, spec: LayerSpec, expert: int) -> bytes:
    path = f"/block/{spec.layer}/{expert}"
    data = await client.get_bytes(path, spec.block_bytes)
    digest = await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
    if digest != spec.sha256[expert]:
        problem = f"what node {client.url} sent as block ({spec.layer}, {expert}) is something else"
        raise StoreCorrupt(spec.file, problem, _LEAVE_OUT)
    return data

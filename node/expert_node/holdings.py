"""Blocks that a node takes over while it serves: from its disk, else from a peer, verified."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from threading import Lock

from expert_network.errors import ExpertNetworkError, OutOfMemory
from expert_network.net.auth import ClusterKey
from expert_network.net.blocks import fetch_block
from expert_network.net.control import ControlClient
from expert_network.store.manifest import LayerSpec
from expert_network.store.reader import Store
from expert_network.units import size
from expert_node.compute import Computer, Ids

log = logging.getLogger("expert_node")

#: For one peer to answer with a block, and without a byte from it.
PEER_S, PEER_SILENCE_S = 60.0, 2.0
#: Bytes of memory that stay free whatever is adopted.
SPARE_BYTES = 200_000_000


class Holdings:
    """What a node holds beside its partition, and how it gets more.

    key: the cluster's. room: how many bytes of memory are available.
    """

    def __init__(
        self,
        node: str,
        store: Store,
        computer: Computer,
        key: ClusterKey | None,
        room: Callable[[], int],
    ) -> None:
        self._node, self._store, self._computer = node, store, computer
        self._key, self._room = key, room
        # Two drivers that miss the same node ask for the same blocks.
        self._one = Lock()

    def adopt(self, layer: int, experts: Ids, peers: Sequence[str]) -> str | None:
        """Hold blocks from now on; None, or the sentence of why one of them cannot be.

        Blocks for as long as that takes: PEER_S for each peer that has none. Any thread.
        """
        spec = self._store.manifest.layer(layer)
        with self._one:
            wanted = [e for e in experts.tolist() if not self._computer.held_here(layer, e)]
            needed, free = len(wanted) * spec.block_bytes, self._room() - SPARE_BYTES
            if needed > free:
                return (
                    f"node {self._node} has no memory for block ({layer}, {wanted[0]}), "
                    f"{size(needed)} and {size(max(0, free))} free; add a node, or replicas"
                )
            blocks, reasons = {}, []
            for expert in wanted:
                try:
                    blocks[expert] = self._store.read_block(layer, expert)
                except ExpertNetworkError as error:
                    reasons.append(str(error))
            rest = [expert for expert in wanted if expert not in blocks]
            if rest:
                blocks |= asyncio.run(self._from_peers(spec, rest, peers))
            missing = [expert for expert in wanted if expert not in blocks]
            if missing:
                log.warning("block (%d, %d) is not to be had: %s", layer, missing[0], reasons[0])
                return (
                    f"node {self._node} has no block ({layer}, {missing[0]}) on its disk, and none "
                    f"of {len(peers)} peers gives it; start a node that holds it"
                )
            self._computer.hold(spec, blocks)
            log.info("adopted %s of layer %d", ", ".join(map(str, wanted)), layer)
        return None

    def take(self, layer: int, expert: int, data: bytes | bytearray) -> None:
        """Hold a block that somebody gives us, whose sha256 is right, from now on. Any thread.

        Raises OutOfMemory.
        """
        spec = self._store.manifest.layer(layer)
        with self._one:
            if self._computer.held_here(layer, expert):
                return
            free = self._room() - SPARE_BYTES
            if spec.block_bytes > free:
                what = f"block ({layer}, {expert}) on node {self._node}"
                raise OutOfMemory(what, spec.block_bytes, max(0, free), "add a node, or replicas")
            self._computer.hold(spec, {expert: memoryview(data)})
        log.info("was given block (%d, %d)", layer, expert)

    async def _from_peers(
        self, spec: LayerSpec, experts: Sequence[int], peers: Sequence[str]
    ) -> dict[int, memoryview]:
        """The blocks that a peer has, each from the first that gives it."""
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(
                    ControlClient(url, self._key, total=PEER_S, silence=PEER_SILENCE_S)
                )
                for url in peers
            ]
            found = await asyncio.gather(*(_first(clients, spec, expert) for expert in experts))
        return {e: block for e, block in zip(experts, found, strict=True) if block is not None}


async def _first(
    clients: Sequence[ControlClient], spec: LayerSpec, expert: int
) -> memoryview | None:
    """A verified block from the first peer that has it, if one has."""
    if not clients:
        return None
    try:
        return await fetch_block(clients, spec, expert)
    except ExpertNetworkError as error:
        log.warning("no block (%d, %d) from a peer: %s", spec.layer, expert, error)
        return None

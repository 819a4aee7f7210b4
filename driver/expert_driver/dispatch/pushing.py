"""Blocks from the driver's own store, for a node that is to adopt them and finds them nowhere."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from expert_network.errors import ExpertNetworkError
from expert_network.net.auth import ClusterKey
from expert_network.net.control import ControlClient
from expert_network.store.reader import Store

#: For a node to take one block, and without a sign of it.
PUSH_S, SILENCE_S = 60.0, 5.0


class Pusher:
    """Gives blocks of `store`, which may lack some or all, to nodes."""

    def __init__(self, store: Store, key: ClusterKey | None) -> None:
        self._store, self._key = store, key

    def push(self, url: str, layer: int, experts: Sequence[int]) -> bool:
        """Whether a node has got all of these blocks. Blocks for PUSH_S for each."""
        try:
            # Verified as they are read: a node refuses what is damaged, but late.
            blocks = {expert: self._store.read_block(layer, expert) for expert in experts}
            asyncio.run(self._push(url, layer, blocks))
        except ExpertNetworkError:
            return False
        return True

    async def _push(self, url: str, layer: int, blocks: dict[int, memoryview]) -> None:
        async with ControlClient(url, self._key, total=PUSH_S, silence=SILENCE_S) as node:
            for expert, block in blocks.items():
                await node.put_block(layer, expert, block)

"""Spot checks: whether nodes have in memory, and so compute with, what the manifest says."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from hmac import compare_digest
from random import Random

from expert_driver.status import NodeStatus
from expert_network.errors import (
    BlockCorrupt,
    ExpertNetworkError,
    KeyRefused,
    NodeError,
    NodeRefused,
    StoreError,
)
from expert_network.net.answers import not_a_node
from expert_network.net.auth import ClusterKey
from expert_network.net.control import ControlClient
from expert_network.net.proof import proof
from expert_network.progress import Progress, silent
from expert_network.store.manifest import Manifest
from expert_network.store.reader import Store

NONCE = 32  # bytes
#: Bytes of the answer, {"proof": 64 digits}.
_ANSWER = 1 << 10


@dataclass(frozen=True)
class Sample:
    """A block that a node says it has in memory."""

    node: NodeStatus
    layer: int
    expert: int


def choose(nodes: Sequence[NodeStatus], count: int, random: Random) -> list[Sample]:
    """`count` blocks of each node, or all that it holds, in a random order."""
    return [
        Sample(node, layer, expert)
        for node in nodes
        for layer, expert in random.sample(sorted(node.blocks), min(count, len(node.blocks)))
    ]


def spot_check(
    samples: Sequence[Sample],
    nodes: Sequence[NodeStatus],
    manifest: Manifest,
    key: ClusterKey | None,
    own: Store | None = None,
    progress: Progress = silent,
) -> list[ExpertNetworkError]:
    """Have each sample proved and return what is wrong, an empty list if nothing is.

    The right bytes come from `own` where it has them, else from whichever of `nodes` gives bytes of
    the manifest's sha256. BlockCorrupt names a node, layer and expert; other errors are those of
    nodes that could not be asked. Nodes are asked side by side, for one block at a time.
    """

    async def run() -> list[ExpertNetworkError]:
        async with AsyncExitStack() as stack:
            clients = {
                node.url: await stack.enter_async_context(ControlClient(node.url, key))
                for node in nodes
            }
            check = _Check(nodes, clients, manifest, own, progress, len(samples))
            mine = [[s for s in samples if s.node == node] for node in nodes]
            found = await asyncio.gather(*(check.all(some) for some in mine))
        problems = [problem for some in found for problem in some]
        # A node that gave wrong bytes to others is found several times.
        return list({str(problem): problem for problem in problems}.values())

    return asyncio.run(run())


class _Check:
    def __init__(
        self,
        nodes: Sequence[NodeStatus],
        clients: Mapping[str, ControlClient],
        manifest: Manifest,
        own: Store | None,
        progress: Progress,
        total: int,
    ) -> None:
        self._nodes, self._clients, self._manifest = nodes, clients, manifest
        self._own, self._progress, self._total = own, progress, total
        self._done = 0

    async def all(self, samples: Sequence[Sample]) -> list[ExpertNetworkError]:
        problems: list[ExpertNetworkError] = []
        for sample in samples:
            try:
                problems += await self._one(sample)
            except (NodeError, KeyRefused) as error:
                return [*problems, error]
            self._done += 1
            self._progress(self._done, self._total, "checking blocks in memory")
        return problems

    async def _one(self, sample: Sample) -> list[ExpertNetworkError]:
        problems: list[ExpertNetworkError] = []
        block = await self._right_bytes(sample, problems)
        if block is None:
            return problems
        nonce = secrets.token_bytes(NONCE)
        path = f"{_path(sample)}/proof?nonce={nonce.hex()}"
        client = self._clients[sample.node.url]
        answer = await client.get_json(path, _ANSWER)
        given = answer.get("proof") if isinstance(answer, dict) else None
        if not isinstance(given, str) or not given.isascii():
            raise not_a_node(client.url, f"answered {path} with something that is no JSON proof")
        if not compare_digest(given, proof(nonce, block)):
            problems.append(_corrupt(sample.node, sample))
        return problems

    async def _right_bytes(
        self, sample: Sample, problems: list[ExpertNetworkError]
    ) -> bytes | memoryview | None:
        """The block; None if nobody has it right, with the reasons in `problems`."""
        if self._own is not None:
            try:
                return await asyncio.to_thread(self._own.read_block, sample.layer, sample.expert)
            except StoreError:
                pass  # a store may hold a part of its blocks
        spec = self._manifest.layer(sample.layer)
        for node in self._sources(sample):
            client = self._clients[node.url]
            try:
                data = await client.get_bytes(_path(sample), spec.block_bytes)
            except NodeRefused:
                continue
            if hashlib.sha256(data).hexdigest() == spec.sha256[sample.expert]:
                return data
            problems.append(_corrupt(node, sample))
        return None

    def _sources(self, sample: Sample) -> Iterator[NodeStatus]:
        """Others first: a node that is wrong should not be asked what is right."""
        yield from (node for node in self._nodes if node != sample.node)
        yield sample.node


def _path(sample: Sample) -> str:
    return f"/block/{sample.layer}/{sample.expert}"


def _corrupt(node: NodeStatus, sample: Sample) -> BlockCorrupt:
    return BlockCorrupt(node.name, sample.layer, sample.expert)

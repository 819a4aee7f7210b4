"""What a driver asks nodes over HTTP: their status, and their store but for the blocks."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from expert_driver.status import NodeStatus
from expert_network.errors import ExpertNetworkError, NetworkMismatch, StoreCorrupt
from expert_network.net.auth import ClusterKey
from expert_network.net.blocks import LEAVE_OUT
from expert_network.net.control import ControlClient
from expert_network.net.fetch import fetch_store
from expert_network.progress import Progress
from expert_network.store.manifest import MANIFEST, MAX_MANIFEST, Manifest
from expert_network.store.reader import Store

T = TypeVar("T")
_HEALTH_STATUSES = (200, 503)  # a node that loads or drains says so with 503


def fetch(urls: Sequence[str], key: ClusterKey | None, cache: Path, progress: Progress) -> Store:
    """The store that all of `urls` serve, without its blocks, from the cache if it is there.

    Raises NodeError, KeyRefused, StoreError and their kin; NetworkMismatch if the nodes serve
    several models.
    """

    async def run() -> Path:
        digest = (await _of_one_model(urls, key))[0].model_digest
        return await fetch_store(urls, cache / digest, key, digest, progress)

    return Store.open(asyncio.run(run()), blocks=False)


def statuses(urls: Sequence[str], key: ClusterKey | None) -> list[NodeStatus]:
    """What each node says of itself, in the order of `urls`; a failure is a row as well."""

    async def run() -> list[NodeStatus]:
        return await asyncio.gather(*(_status(url, key) for url in urls))

    return asyncio.run(run())


async def _status(url: str, key: ClusterKey | None) -> NodeStatus:
    try:
        async with ControlClient(url, key) as client:
            health = await client.get_json("/health", statuses=_HEALTH_STATUSES)
            return NodeStatus.read(url, health, await client.get_json("/status"))
    except ExpertNetworkError as error:
        return NodeStatus(url, str(error).removesuffix("."))


def holders(
    urls: Sequence[str], key: ClusterKey | None, own: Store | None
) -> tuple[list[NodeStatus], Manifest]:
    """What the nodes at `urls` hold, in their order, and the manifest of it.

    Raises as `fetch` does; NetworkMismatch as well if it is not the model of the store `own`.
    """

    async def run() -> tuple[list[NodeStatus], Manifest]:
        nodes = await _of_one_model(urls, key)
        return nodes, await _manifest(nodes[0], key) if own is None else own.manifest

    nodes, manifest = asyncio.run(run())
    held = nodes[0].model_digest
    if held != manifest.digest:
        raise NetworkMismatch(
            f"the nodes hold another model ({held[:12]}) than this driver's store "
            f"({manifest.digest[:12]}); name the store that they were started with, or none."
        )
    return nodes, manifest


async def _manifest(node: NodeStatus, key: ClusterKey | None) -> Manifest:
    async with ControlClient(node.url, key) as client:
        data = await client.get_bytes("/manifest", MAX_MANIFEST)
    if hashlib.sha256(data).hexdigest() != node.model_digest:
        problem = f"what node {node.url} sent is not the manifest {node.model_digest[:12]}"
        raise StoreCorrupt(MANIFEST, problem, LEAVE_OUT)
    return Manifest.from_bytes(data, node.url)


async def _of_one_model(urls: Sequence[str], key: ClusterKey | None) -> list[NodeStatus]:
    async def ask(url: str) -> NodeStatus:
        async with ControlClient(url, key) as client:
            status = NodeStatus.read(url, {"status": "ok"}, await client.get_json("/status"))
            if status.error:
                raise NetworkMismatch(f"{status.error}.")
            return status

    nodes = await _all(ask, urls)
    found = {node.url: node.model_digest for node in nodes}
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{url}: {digest[:12]}" for url, digest in found.items())
        raise NetworkMismatch(
            f"the nodes serve different models ({listed}); start them with the same store, or name "
            "only those that have one."
        )
    return nodes


async def _all(ask: Callable[[str], Awaitable[T]], urls: Sequence[str]) -> list[T]:
    """Ask all at once; raises what the first of them in order fails with, once all have ended."""
    results = await asyncio.gather(*(ask(url) for url in urls), return_exceptions=True)
    answers: list[T] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        answers.append(result)
    return answers

"""What a driver asks nodes over HTTP: their status, and their store but for the blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from expert_driver.status import NodeStatus
from expert_network.errors import ExpertNetworkError, NetworkMismatch
from expert_network.net.auth import ClusterKey
from expert_network.net.control import ControlClient
from expert_network.net.fetch import fetch_store
from expert_network.progress import Progress
from expert_network.store.reader import Store

T = TypeVar("T")
_HEALTH_STATUSES = (200, 503)  # a node that loads or drains says so with 503


def fetch(urls: Sequence[str], key: ClusterKey | None, cache: Path, progress: Progress) -> Store:
    """The store that all of `urls` serve, without its blocks, from the cache if it is there.

    Raises NodeError, KeyRefused, StoreError and their kin; NetworkMismatch if the nodes serve
    several models.
    """

    async def run() -> Path:
        digest = await _one_digest(urls, key)
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


async def _one_digest(urls: Sequence[str], key: ClusterKey | None) -> str:
    async def ask(url: str) -> str:
        async with ControlClient(url, key) as client:
            status = NodeStatus.read(url, {"status": "ok"}, await client.get_json("/status"))
            if status.error:
                raise NetworkMismatch(f"{status.error}.")
            return status.model_digest

    found = dict(zip(urls, await _all(ask, urls), strict=True))
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{url}: {digest[:12]}" for url, digest in found.items())
        raise NetworkMismatch(
            f"the nodes serve different models ({listed}); start them with the same store, or name "
            "only those that have one."
        )
    return next(iter(found.values()))


async def _all(ask: Callable[[str], Awaitable[T]], urls: Sequence[str]) -> list[T]:
    """Ask all at once; raises what the first of them in order fails with, once all have ended."""
    results = await asyncio.gather(*(ask(url) for url in urls), return_exceptions=True)
    answers: list[T] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        answers.append(result)
    return answers

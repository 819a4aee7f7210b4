"""What a node with --peers does before it loads: get the manifest, and what it owns, from others.

It answers meanwhile. A block is served as soon as it is verified.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from expert_network import disk
from expert_network.errors import StoreError
from expert_network.net.fetch import fetch_store, fetch_trunk
from expert_network.net.pinning import Confirm, pinned
from expert_network.net.swarm import Report, fetch_blocks
from expert_network.progress import Progress
from expert_network.store.reader import Store
from expert_network.units import size
from expert_node.config import NodeConfig
from expert_node.startup import Startup, missing

log = logging.getLogger("expert_node")


async def agreed_digest(config: NodeConfig, dest: Path, confirm: Confirm | None) -> str:
    """The digest of the manifest to fetch into `dest`. Raises what pinned raises."""
    wanted, urls = config.manifest_sha256, config.peer_urls
    return await pinned(dest, wanted, urls, config.key, confirm, log.warning)


async def fetch_files(config: NodeConfig, dest: Path, digest: str, progress: Progress) -> Store:
    """The store at `dest`, made with everything but trunk and blocks if it is not there.

    Raises what fetch_store raises.
    """
    made = await fetch_store(config.peer_urls, dest, config.key, digest, progress, part=True)
    return Store.open(made)


async def fetch_partition(config: NodeConfig, settled: Startup, progress: Progress) -> None:
    """What the store lacks of the node's blocks, and of the trunk unless that is not wanted.

    Raises what fetch_blocks and fetch_trunk raise, with what is verified kept.
    """
    store, wanted = settled.store, missing(settled)
    trunk = not config.no_trunk and not store.trunk_path.exists()
    if not wanted and not trunk:
        return
    with _held(store):
        urls = config.peer_urls
        try:
            if wanted:
                report = await fetch_blocks(store, wanted, urls, config.key, progress, log.warning)
                _say(report)
                urls = _best_first(report)
            if trunk:
                await fetch_trunk(store, urls, config.key, progress)
        finally:
            # It may take seconds, and the node answers meanwhile.
            await asyncio.to_thread(store.sync)
    apparent, real = disk.sizes(store.path)
    log.info("%s: %s, %s of them on the disk", store.path, size(apparent), size(real))


@contextmanager
def _held(store: Store) -> Iterator[None]:
    """Keep a second node from fetching into the same store."""
    folder = disk.lock(store.path)
    if folder is None:
        advice = "give each node a store of its own, or wait until it ends"
        raise StoreError(store.path, "another process is fetching into this store now", advice)
    try:
        yield
    finally:
        os.close(folder)


def _best_first(report: Report) -> list[str]:
    """The peers, for what comes from one alone: who gave most first, who was left out last."""
    order = sorted(report.sources, key=lambda source: (bool(source.dropped), -source.received))
    return [source.url for source in order]


def _say(report: Report) -> None:
    rate = size(report.kept / max(report.seconds, 1e-3))
    log.info("fetched %d blocks, %s at %s/s", report.blocks, size(report.kept), rate)
    for source in report.sources:
        left_out = f"; left out: {source.dropped}" if source.dropped else ""
        given = size(source.received)
        log.info("  from node %s: %d blocks, %s%s", source.url, source.blocks, given, left_out)
    if report.wasted:
        log.info("  fetched once more: %s", size(report.wasted))

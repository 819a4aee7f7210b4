"""Which manifest is the right one: said by who started this, agreed on by peers, or confirmed.

Everything else is checked against the manifest; so the manifest is never taken from one peer alone.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from expert_network.errors import (
    ExpertNetworkError,
    InputError,
    NetworkMismatch,
    NotANode,
    StoreError,
)
from expert_network.net.auth import ClusterKey
from expert_network.net.control import ControlClient
from expert_network.store.manifest import MANIFEST, MAX_MANIFEST, Manifest
from expert_network.units import size

# Shows a person a question; whether it was answered with yes.
Confirm = Callable[[str], Awaitable[bool]]


@dataclass(frozen=True)
class _Offer:
    """The manifest of one peer."""

    url: str
    digest: str
    manifest: Manifest


async def pinned(
    dest: Path,
    wanted: str | None,
    urls: Sequence[str],
    key: ClusterKey | None,
    confirm: Confirm | None,
    tell: Callable[[str], None] = lambda sentence: None,
) -> str:
    """The model digest to fetch into `dest`.

    That of the store which is there, else `wanted`, else what all peers that answer, and two at
    least, say; else what `confirm` agrees to. tell: given a sentence about peers that did not
    answer. Raises StoreError if `dest` has another manifest than `wanted`; NetworkMismatch if peers
    disagree; InputError if nothing vouches for it; what the first peer failed with if none answers.
    """
    here = _digest_in(dest)
    if here and wanted and here != wanted:
        problem = f"the store here has the manifest {here[:12]} and {wanted[:12]} is asked for"
        raise StoreError(dest, problem, "name another folder, or give that store's digest")
    if here or wanted:
        return here or str(wanted)
    offers = await _offers(urls, key, tell)
    if len({offer.digest for offer in offers}) > 1:
        listed = ", ".join(f"{offer.url}: {offer.digest[:12]}" for offer in offers)
        raise NetworkMismatch(
            f"the peers serve different models ({listed}); give the digest of the one that is "
            "meant with --manifest-sha256, or name only its peers."
        )
    offer = offers[0]
    if len(offers) > 1 or (confirm is not None and await confirm(_question(offer))):
        return offer.digest
    raise InputError(
        f"only node {offer.url} says what the manifest is, and one peer alone is not believed; "
        f"if {offer.digest} is the right model digest, give it with --manifest-sha256."
    )


async def _offers(
    urls: Sequence[str], key: ClusterKey | None, tell: Callable[[str], None]
) -> list[_Offer]:
    """The manifests of those peers that answer, at least one."""
    asked = await asyncio.gather(*(_ask(url, key) for url in urls))
    errors = [answer for answer in asked if isinstance(answer, ExpertNetworkError)]
    if len(errors) == len(asked):
        raise errors[0]
    for error in errors:
        tell(str(error))
    return [answer for answer in asked if isinstance(answer, _Offer)]


async def _ask(url: str, key: ClusterKey | None) -> _Offer | ExpertNetworkError:
    try:
        async with ControlClient(url, key) as client:
            data = await client.get_bytes("/manifest", MAX_MANIFEST)
            manifest = Manifest.from_bytes(data, MANIFEST)
            return _Offer(client.url, hashlib.sha256(data).hexdigest(), manifest)
    except StoreError as error:
        problem = f"sends a manifest that cannot be used ({error.problem})"
        return NotANode(url, problem, "leave that node out, or see which version runs there")
    except ExpertNetworkError as error:
        return error


def _question(offer: _Offer) -> str:
    manifest = offer.manifest
    return (
        f"Only node {offer.url} says what the manifest is: a {manifest.model_type} of "
        f"{manifest.block_count:,} blocks, {size(manifest.total_bytes)}, with the digest\n"
        f"  {offer.digest}\nIs that the model you want"
    )


def _digest_in(folder: Path) -> str | None:
    try:
        return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    except OSError:
        return None

"""One block from a peer: received into place, and gone on with from another."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Sequence

import aiohttp

from expert_network.errors import ExpertNetworkError, NodeClosed, StoreCorrupt
from expert_network.net.control import ControlClient
from expert_network.store.manifest import LayerSpec

#: Bytes a second below which a peer is no source: a deadline follows from a size.
SLOWEST = 64 << 10
#: What to do about a peer whose bytes are wrong.
LEAVE_OUT = "leave that node out, and verify its store with `expert-net verify`"

_RANGE = re.compile(r"bytes (\d{1,15})-\d{1,15}/\d{1,15}")


class Arriving:
    """A block as far as it has come: the first `got` bytes of `data`, which is block_bytes long."""

    def __init__(self, spec: LayerSpec, expert: int) -> None:
        self.spec, self.expert = spec, expert
        self.data, self.got = bytearray(spec.block_bytes), 0

    @property
    def at(self) -> tuple[int, int]:
        """Layer and expert."""
        return self.spec.layer, self.expert

    @property
    def rest(self) -> int:
        """Bytes that are missing."""
        return len(self.data) - self.got


async def receive(
    client: ControlClient, block: Arriving, moved: Callable[[int], None] = lambda count: None
) -> None:
    """Receive what is missing of a block. What came before an error stays; nothing is verified.

    moved: told of bytes gained, and of bytes lost by starting over, as a negative count. Ends
    within the client's deadline and the block's size over SLOWEST. Raises what ControlClient
    raises; StoreCorrupt for an answer of another length.
    """
    layer, expert = block.at
    headers = {}
    if block.got:
        tag = block.spec.sha256[expert]
        headers = {"Range": f"bytes={block.got}-", "If-Range": f'"{tag}"'}
    deadline = client.total + block.rest / SLOWEST
    view = memoryview(block.data)
    path = f"/block/{layer}/{expert}"
    async with client.get(path, headers, (200, 206), deadline) as response:
        start = start_of(response)
        if start == 0 and block.got:
            moved(-block.got)
            block.got = 0
        if start != block.got:
            raise _wrong(client, block, "another part than was asked for")
        while not response.content.at_eof():
            # Not readany, which joins what is there: one copy less.
            piece, _ = await response.content.readchunk()
            if len(piece) > block.rest:
                raise _wrong(client, block, "more than there is of it")
            view[block.got : block.got + len(piece)] = piece
            block.got += len(piece)
            moved(len(piece))
    if block.rest:
        problem = f"sent {block.got} of the {len(block.data)} bytes of block ({layer}, {expert})"
        raise NodeClosed(client.url, problem, "check that it still runs, and its log")


async def fetch_block(clients: Sequence[ControlClient], spec: LayerSpec, expert: int) -> memoryview:
    """A verified block from the first peer that has it.

    Raises what the first of them failed with; ValueError if there is none.
    """
    errors: list[ExpertNetworkError] = []
    for client in clients:
        block = Arriving(spec, expert)
        try:
            await receive(client, block)
            if await asyncio.to_thread(_sha256, block.data) != spec.sha256[expert]:
                raise _wrong(client, block, "bytes that are not its own")
            return memoryview(block.data)
        except ExpertNetworkError as error:
            errors.append(error)
    if not errors:
        raise ValueError("no peer to fetch from")
    raise errors[0]


def start_of(response: aiohttp.ClientResponse) -> int | None:
    """At which byte of the whole an answer begins."""
    if response.status == 200:
        return 0
    match = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
    return int(match[1]) if match else None


def _sha256(data: bytearray) -> str:
    return hashlib.sha256(data).hexdigest()


def _wrong(client: ControlClient, block: Arriving, what: str) -> StoreCorrupt:
    layer, expert = block.at
    problem = f"for block ({layer}, {expert}) node {client.url} sent {what}"
    return StoreCorrupt(block.spec.file, problem, LEAVE_OUT)

"""A peer that serves a store's files over real HTTP, and can do it badly."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web
from aiohttp.test_utils import TestServer

from expert_network.errors import KeyRefused, StoreError
from expert_network.net.auth import ClusterKey, NonceTable, challenge, verify
from expert_network.store.reader import Store

#: Answers a request instead of the peer: it is given what the right answer's body would be.
Fault = Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]


@dataclass
class Peer:
    """A running peer. `asked` holds the path and the Range of each request that was let in."""

    url: str = ""
    asked: list[tuple[str, str | None]] = field(default_factory=list)

    def count(self, path: str) -> int:
        return [asked for asked, _ in self.asked].count(path)


@asynccontextmanager
async def serving_store(
    store: Path, key: ClusterKey | None = None, faults: Mapping[str, Fault] | None = None
) -> AsyncIterator[Peer]:
    """A peer with the files of `store`; `faults` answer for their paths."""
    peer = Peer()
    nonces = NonceTable(time.monotonic)

    async def handle(request: web.Request) -> web.StreamResponse:
        headers = {}
        if key is not None:
            try:
                proof = verify(
                    key, nonces, "GET", request.raw_path, request.headers.get("Authorization")
                )
            except KeyRefused as error:
                refused = {"WWW-Authenticate": challenge(nonces)}
                return web.json_response({"error": str(error)}, status=401, headers=refused)
            headers["Authentication-Info"] = proof
        peer.asked.append((request.path, request.headers.get("Range")))
        name = request.path.removeprefix("/file/").replace("/manifest", "manifest.json").lstrip("/")
        data = _content(store, name)
        fault = (faults or {}).get(request.path)
        if fault is not None:
            return await fault(request, data or b"")
        if data is None:
            return web.json_response({"error": "it is not here"}, status=404, headers=headers)
        return _part(request, data, headers)

    app = web.Application()
    app.router.add_get("/{path:.*}", handle)
    async with TestServer(app) as server:
        peer.url = f"http://127.0.0.1:{server.port}"
        yield peer


def _content(store: Path, name: str) -> bytes | None:
    """A file's bytes, or those of "block/LAYER/EXPERT"; None if the store lacks it."""
    if not name.startswith("block/"):
        return (store / name).read_bytes() if (store / name).is_file() else None
    layer, expert = map(int, name.split("/")[1:])
    try:
        return bytes(Store.open_unchecked(store).read_block(layer, expert))
    except StoreError:
        return None


def _part(request: web.Request, data: bytes, headers: dict[str, str]) -> web.Response:
    tag = f'"{hashlib.sha256(data).hexdigest()}"'
    asked = request.headers.get("Range")
    if asked is None or request.headers.get("If-Range", tag) != tag:
        return web.Response(body=data, headers=headers)
    start = int(asked.removeprefix("bytes=").removesuffix("-"))
    headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
    return web.Response(status=206, body=data[start:], headers=headers)


# Faults


async def corrupt(request: web.Request, data: bytes) -> web.StreamResponse:
    """The right length, one bit wrong, from the start whatever was asked."""
    return web.Response(body=data[:-1] + bytes([data[-1] ^ 1]))


async def too_long(request: web.Request, data: bytes) -> web.StreamResponse:
    """More than there is."""
    return web.Response(body=data + b"more")


async def without_range(request: web.Request, data: bytes) -> web.StreamResponse:
    """All of it, whatever was asked."""
    return web.Response(body=data)


async def wrong_part(request: web.Request, data: bytes) -> web.StreamResponse:
    """Another part than was asked."""
    total = len(data)
    headers = {"Content-Range": f"bytes 1-{total - 1}/{total}"}
    return web.Response(status=206, body=data[1:], headers=headers)


async def refuse(request: web.Request, data: bytes) -> web.StreamResponse:
    """A node's own error."""
    return web.json_response({"error": "this node is draining"}, status=503)


def cut_after(count: int) -> Fault:
    """A peer that dies after `count` bytes of each answer, which it takes up where it was asked."""

    async def cut(request: web.Request, data: bytes) -> web.StreamResponse:
        start = int((request.headers.get("Range") or "bytes=0-")[6:-1])
        response = web.StreamResponse(status=206 if start else 200)
        response.content_length = len(data) - start
        if start:
            response.headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        await response.prepare(request)
        await response.write(data[start : start + count])
        if start + count < len(data):
            assert request.transport is not None
            request.transport.close()
        return response

    return cut


async def flipped(request: web.Request, data: bytes) -> web.StreamResponse:
    """One bit wrong in the middle, in whatever part was asked."""
    middle = len(data) // 2
    return _part(request, data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :], {})


def dripping(pause_s: float, count: int = 1000) -> Fault:
    """A peer that sends `count` bytes at a time, with a pause after each."""

    async def drip(request: web.Request, data: bytes) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_length = len(data)
        await response.prepare(request)
        for start in range(0, len(data), count):
            await response.write(data[start : start + count])
            await asyncio.sleep(pause_s)
        return response

    return drip


def stall_after(count: int, released: asyncio.Event) -> Fault:
    """A peer that falls silent after `count` bytes, until it is released."""

    async def stall(request: web.Request, data: bytes) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_length = len(data)
        await response.prepare(request)
        await response.write(data[:count])
        await released.wait()
        assert request.transport is None or request.transport.is_closing()
        return response

    return stall

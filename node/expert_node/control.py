"""The control plane: what a node says and gives over HTTP, on the same port as its links.

    GET /health                     {"status": "ok"}; 503 while it is not ready. Needs no key
    GET /status                     who this is, what it holds, what it has done
    GET /manifest                   the canonical manifest; its ETag is the model digest
    GET /block/{layer}/{expert}     one block's bytes; its ETag is their sha256
    GET /block/{layer}/{expert}/proof?nonce=HEX     that it is right in memory, see net/proof.py
    GET /file/{name}                a file of the manifest
    GET /metrics                    for Prometheus
    GET /roster                     the roster that is served, and the one that is proposed
    POST /roster/propose            begin to gain what a new roster gives this node
    POST /roster/commit             flip to it
    POST /roster/cancel             give it up
    GET /link                       with an Upgrade: the hand-over to a link

Every error is JSON, {"error": "a sentence"}.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import NoReturn

import numpy as np
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from expert_network.errors import (
    InputError,
    KeyRefused,
    NotOwned,
    RosterError,
    StoreError,
)
from expert_network.net.auth import ClusterKey, NonceTable, challenge, verify
from expert_network.net.proof import proof, read_nonce
from expert_network.net.rosters import ANSWER_S, Order
from expert_network.net.stream import SLOWEST
from expert_network.store.reader import Store
from expert_network.units import size
from expert_node.content import Content, Source, send
from expert_node.handover import hand_over
from expert_node.membership import Conflict, Proposal, read_order
from expert_node.metrics import exposition
from expert_node.startup import Startup
from expert_node.state import NodeState, Phase, Serving
from expert_roster.rendezvous import owners

log = logging.getLogger("expert_node")

#: Bytes of a file that are read and sent at once.
PIECE = 1 << 20
#: Blocks that are sent at a time, each whole in memory meanwhile: as many as take these bytes, and
#: a few at least. Few clients that take them slowly must not keep others waiting.
SENDING_BYTES, LEAST_BLOCKS = 100_000_000, 4
#: Of a request's body: the roster of 4096 nodes and their addresses.
MAX_BODY = 2 << 20
#: For a body to come.
BODY_SECONDS = 30.0
OPEN_PATH = "/health"

# That we know the key too, for the answer to the request of this task; aiohttp gives each its own.
_proof: ContextVar[str | None] = ContextVar("proof", default=None)


async def _expecting(request: web.Request) -> None:
    """Say nothing to an Expect header: what little body there is comes anyhow.

    aiohttp's own handler runs before the key is asked for, and fails on what is no UTF-8.
    """


class Control:
    """The handlers of one node."""

    def __init__(self, state: NodeState) -> None:
        self._state = state
        # One core at most, whoever asks.
        self._proving = asyncio.Lock()
        # One body in memory at a time.
        self._taking = asyncio.Lock()
        # Both are made when a model is known.
        self._sending: asyncio.Semaphore | None = None
        self._exposition: Callable[[], bytes] | None = None

    def routes(self) -> list[web.RouteDef]:
        """What is served where."""
        served = [
            web.get("/health", self.health),
            web.get("/status", self.status),
            web.get("/manifest", self.manifest),
            web.get(r"/block/{layer:\d{1,5}}/{expert:\d{1,5}}", self.block),
            web.put(r"/block/{layer:\d{1,5}}/{expert:\d{1,5}}", self.take),
            web.get(r"/block/{layer:\d{1,5}}/{expert:\d{1,5}}/proof", self.proof),
            web.get("/file/{name}", self.file),
            web.get("/metrics", self.metrics),
            web.get("/link", self.link, allow_head=False),
            web.get("/roster", self.roster),
            web.post("/roster/propose", self.propose),
            web.post("/roster/commit", self.commit),
            web.post("/roster/cancel", self.cancel),
            web.route("*", "/{path:.*}", self.nothing),
        ]
        for route in served:
            route.kwargs["expect_handler"] = _expecting
        return served

    async def nothing(self, request: web.Request) -> NoReturn:
        if request.method not in ("GET", "HEAD"):
            raise web.HTTPMethodNotAllowed(request.method, ("GET", "HEAD"))
        raise web.HTTPNotFound()

    async def health(self, request: web.Request) -> web.Response:
        phase = self._state.phase
        return web.json_response({"status": phase.value}, status=200 if phase is Phase.OK else 503)

    async def status(self, request: web.Request) -> web.Response:
        return web.json_response(self._state.status(self._serving()))

    async def metrics(self, request: web.Request) -> web.Response:
        if self._exposition is None:
            self._settled()
            self._exposition = exposition(
                self._state.counters, self._state.build(), self._state.gauges
            )
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=self._exposition(), headers=headers)

    async def manifest(self, request: web.Request) -> web.StreamResponse:
        data, digest = self._store.manifest.to_bytes(), self._store.digest
        return await send(request, Content(len(data), digest, _held(data), "application/json"))

    async def file(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        spec = self._store.manifest.files.get(name)
        if spec is None:
            _missing(f"this model has no file {name!r}")
        if not (self._store.path / name).is_file():
            _missing(f"node {self._settled().name} does not keep {name}; ask another one")
        source = _from_disk(self._store.path / name)
        return await send(request, Content(spec.size, spec.sha256, source))

    async def block(self, request: web.Request) -> web.StreamResponse:
        layer, expert = int(request.match_info["layer"]), int(request.match_info["expert"])
        experts = dict(self._store.manifest.shape).get(layer, 0)
        if expert >= experts:
            _missing(f"this model has no block ({layer}, {expert})")
        spec = self._store.manifest.layer(layer)
        async with self._sending_blocks(spec.block_bytes):
            data = await asyncio.to_thread(self._block_bytes, layer, expert)
            if data is None:
                self._not_here(layer, expert)
            return await send(request, Content(spec.block_bytes, spec.sha256[expert], _held(data)))

    async def take(self, request: web.Request) -> web.Response:
        """Hold a block that a driver gives, since no node has it."""
        layer, expert = int(request.match_info["layer"]), int(request.match_info["expert"])
        if expert >= dict(self._store.manifest.shape).get(layer, 0):
            _missing(f"this model has no block ({layer}, {expert})")
        spec, holdings = self._store.manifest.layer(layer), self._serving().links.holdings
        assert holdings is not None
        # The key proves the sha256 in the address, and this one that it is the manifest's.
        if request.query.get("sha256") != spec.sha256[expert]:
            raise web.HTTPConflict(text=f"this is not the manifest's block ({layer}, {expert})")
        async with self._taking:
            data = await _body(request, spec.block_bytes)
            if await asyncio.to_thread(_sha256, data) != spec.sha256[expert]:
                raise web.HTTPConflict(text=f"block ({layer}, {expert}) came damaged")
            problem = await asyncio.to_thread(holdings.take, layer, expert, data)
        if problem is not None:
            raise unavailable(problem)
        return web.Response(status=204)

    async def proof(self, request: web.Request) -> web.Response:
        layer, expert = int(request.match_info["layer"]), int(request.match_info["expert"])
        try:
            nonce = read_nonce(request.query.get("nonce", ""))
        except InputError as error:
            raise web.HTTPBadRequest(text=str(error)) from None
        partition = self._serving().partition
        try:
            async with self._proving:
                given = await asyncio.to_thread(
                    lambda: proof(nonce, partition.block_bytes(layer, expert))
                )
        except NotOwned:
            name = self._state.settled.name
            _missing(f"node {name} has no block ({layer}, {expert}) in memory")
        return web.json_response({"proof": given})

    async def link(self, request: web.Request) -> web.StreamResponse:
        return await hand_over(request, self._serving().links)

    def _sending_blocks(self, nbytes: int) -> asyncio.Semaphore:
        if self._sending is None:
            self._sending = asyncio.Semaphore(max(LEAST_BLOCKS, SENDING_BYTES // nbytes))
        return self._sending

    async def roster(self, request: web.Request) -> web.Response:
        return web.json_response(self._serving().membership.seat())

    async def propose(self, request: web.Request) -> web.Response:
        """Answers when there is an end to it, or after ANSWER_S with how far it is."""
        membership = self._serving().membership
        try:
            over = membership.propose(Proposal.read(await _message(request)))
        except (Conflict, RosterError) as refusal:
            _conflict(refusal)
        if over is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    await over.wait()
        return web.json_response(membership.seat())

    async def commit(self, request: web.Request) -> web.Response:
        return await self._on(self._serving().membership.commit, request)

    async def cancel(self, request: web.Request) -> web.Response:
        return await self._on(self._serving().membership.cancel, request)

    async def _on(self, act: Callable[[Order], None], request: web.Request) -> web.Response:
        try:
            act(read_order(await _message(request)))
        except (Conflict, RosterError) as refusal:
            _conflict(refusal)
        return web.json_response(self._serving().membership.seat())

    @property
    def _store(self) -> Store:
        return self._settled().store

    def _settled(self) -> Startup:
        if self._state.startup is None:
            raise unavailable("this node is fetching its manifest and has nothing to give yet")
        return self._state.startup

    def _serving(self) -> Serving:
        state, name = self._state, self._settled().name
        if state.serving is None:
            done, total = state.loaded
            doing = "fetching" if state.phase is Phase.FETCHING else "loading"
            raise unavailable(f"node {name} is {doing} its blocks, {size(done)} of {size(total)}")
        return state.serving

    def _block_bytes(self, layer: int, expert: int) -> bytes | memoryview | None:
        """From the partition or, verified, from the disk: a store may hold a part of its blocks."""
        serving = self._state.serving
        if serving is not None and serving.partition.holds(layer, expert):
            return serving.partition.block_bytes(layer, expert)
        if not self._store.holds(layer, expert):
            return None
        try:
            return self._store.read_block(layer, expert)
        except StoreError as error:
            log.info("block (%d, %d) was asked for: %s", layer, expert, error)
            return None

    def _not_here(self, layer: int, expert: int) -> NoReturn:
        settled = self._state.settled
        chosen = owners(settled.roster, np.array([layer]), np.array([expert]))[0]
        names = ", ".join(settled.roster.names[index] for index in chosen)
        _missing(
            f"node {settled.name} has no block ({layer}, {expert}); the roster gives it to {names}"
        )


def application(
    state: NodeState,
    key: ClusterKey | None,
    know: Callable[[asyncio.BaseProtocol], None] = lambda protocol: None,
) -> web.Application:
    """The web application of a node; without a key everyone is let in.

    know: told of connections whose request was let in.
    """
    middlewares: list[Middleware] = [_errors_as_json]
    if key is not None:
        middlewares.append(_guard(key))
    middlewares.append(_knowing(know))
    app = web.Application(middlewares=middlewares, client_max_size=MAX_BODY)
    app.on_response_prepare.append(_add_proof)
    app.add_routes(Control(state).routes())
    return app


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as answer:
        return _as_json(request, answer)
    except ConnectionError:
        raise  # the client left; there is nobody to tell
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return web.json_response(
            {"error": "the node failed to answer; its log says why"}, status=500
        )


def _as_json(request: web.Request, answer: web.HTTPException) -> web.Response:
    """The answer with a sentence in JSON; what aiohttp raised itself gets one of ours."""
    match answer:
        case web.HTTPNotFound() if answer.text == "404: Not Found":
            sentence = f"there is nothing at {request.path}; see /status, /manifest and /metrics"
        case web.HTTPMethodNotAllowed():
            sentence = f"{request.method} is not answered here; use GET"
        case _:
            sentence = answer.text or answer.reason
    headers = {name: value for name, value in answer.headers.items() if name in _KEPT_HEADERS}
    return web.json_response({"error": sentence}, status=answer.status, headers=headers)


_KEPT_HEADERS = ("Allow", "Content-Range", "Retry-After", "Upgrade", "WWW-Authenticate")


def _guard(key: ClusterKey) -> Middleware:
    """A middleware that lets in who holds the key, once for each challenge, and /health."""
    nonces = NonceTable(time.monotonic)

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path == OPEN_PATH:
            return await handler(request)
        try:
            answer = request.headers.get("Authorization")
            _proof.set(verify(key, nonces, request.method, request.raw_path, answer))
        except KeyRefused as refusal:
            raise web.HTTPUnauthorized(
                text=str(refusal), headers={"WWW-Authenticate": challenge(nonces)}
            ) from None
        return await handler(request)

    return guard


def _knowing(know: Callable[[asyncio.BaseProtocol], None]) -> Middleware:
    @web.middleware
    async def knowing(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path != OPEN_PATH:
            know(request.protocol)
        return await handler(request)

    return knowing


async def _add_proof(request: web.Request, response: web.StreamResponse) -> None:
    proof = _proof.get()
    if proof is not None:
        response.headers["Authentication-Info"] = proof


def _held(data: bytes | memoryview) -> Source:
    """Content that is in memory."""

    async def read(start: int, stop: int) -> AsyncGenerator[bytes | memoryview, None]:
        view = memoryview(data)
        for first in range(start, stop, PIECE):
            yield view[first : min(first + PIECE, stop)]

    return read


def _from_disk(path: Path) -> Source:
    """Content of a file, read piece by piece in threads that may wait for the disk."""

    async def read(start: int, stop: int) -> AsyncGenerator[bytes | memoryview, None]:
        file = await asyncio.to_thread(path.open, "rb")
        try:
            while start < stop:
                count = min(PIECE, stop - start)
                piece = await asyncio.to_thread(os.pread, file.fileno(), count, start)
                if not piece:
                    raise ConnectionAbortedError(f"{path} was cut short while it was sent")
                yield piece
                start += len(piece)
        finally:
            file.close()

    return read


async def _body(request: web.Request, most: int) -> bytearray:
    """A body of at most `most` bytes, within BODY_SECONDS and what these take at SLOWEST."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS + most / SLOWEST):
            async for piece in request.content.iter_any():
                body += piece
                if len(body) > most:
                    raise web.HTTPRequestEntityTooLarge(most, len(body))
    except TimeoutError:
        raise web.HTTPRequestTimeout(text="the body comes too slowly") from None
    return body


def _sha256(data: bytearray) -> str:
    return hashlib.sha256(data).hexdigest()


async def _message(request: web.Request) -> object:
    """The JSON of a body, which must be what its sha256 in the query says: the key proves that.

    A page in somebody's browser cannot send this content type unasked.
    """
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(
            text="a roster is set with Content-Type application/json"
        )
    async with asyncio.timeout(BODY_SECONDS):
        body = await request.read()
    if request.query.get("sha256") != hashlib.sha256(body).hexdigest():
        raise web.HTTPBadRequest(text="the body does not have the sha256 that the query says")
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise web.HTTPBadRequest(text="the body is not JSON") from None


def _conflict(refusal: Exception) -> NoReturn:
    raise web.HTTPConflict(text=str(refusal).removesuffix("."))


def _missing(sentence: str) -> NoReturn:
    raise web.HTTPNotFound(text=sentence)


def unavailable(sentence: str) -> web.HTTPServiceUnavailable:
    """503, to be tried again in a second."""
    return web.HTTPServiceUnavailable(text=sentence, headers={"Retry-After": "1"})

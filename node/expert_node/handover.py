"""From HTTP to frames: the Upgrade on GET /link, after which a thread owns the socket."""

from __future__ import annotations

import asyncio
import logging
import os
import socket

from aiohttp import web

from expert_node.links import Links

log = logging.getLogger("expert_node")

UPGRADE = "expert-link/1"
#: For 100 bytes to leave an empty socket buffer.
HANDOVER_SECONDS = 5.0


async def hand_over(request: web.Request, links: Links) -> web.StreamResponse:
    """Answer 101 and serve the link in its own thread; returns when the link has ended.

    After the 101 nothing is raised, since nothing else can be answered: a driver that leaves
    meanwhile is logged.

    Reading is paused before the 101 is written, so whatever a driver sends after it is read by the
    link's thread and nobody else. aiohttp drops what came before, which the protocol forbids: such
    a link gets no WELCOME, or an ERROR at its next frame.
    """
    _check_upgrade(request)
    refusal = links.reserve()
    if refusal is not None:
        raise web.HTTPServiceUnavailable(text=refusal, headers={"Retry-After": "5"})
    response = web.StreamResponse(status=101, headers={"Connection": "Upgrade", "Upgrade": UPGRADE})
    response.force_close()
    taken = None
    try:
        taken = await _take_over(request, response)
    finally:
        if taken is None:
            links.release()
    served = None if taken is None else links.start(*taken)
    if served is not None:
        await asyncio.wrap_future(served)
    return response


async def _take_over(
    request: web.Request, response: web.StreamResponse
) -> tuple[socket.socket, str] | None:
    """Send the 101; the connection's socket and who is at its other end. None: it has left."""
    transport = request.transport
    if transport is None or transport.is_closing():
        return None
    peer = _peer(transport)
    transport.pause_reading()
    try:
        await response.prepare(request)
        await _written(transport)
        return _own_socket(transport), peer
    except OSError as error:  # reset meanwhile, no time or no descriptor left
        log.info("%s got no link: %s", peer, str(error) or "it does not read")
        transport.abort()
        return None


def _check_upgrade(request: web.Request) -> None:
    asked = request.headers.get("Upgrade", "")
    connection = {word.strip().lower() for word in request.headers.get("Connection", "").split(",")}
    if asked == UPGRADE and "upgrade" in connection:
        return
    wanted = f"asks for {asked!r}" if asked else "does not ask for an Upgrade"
    sentence = f"a link begins with Upgrade: {UPGRADE} and this request {wanted}"
    raise web.HTTPUpgradeRequired(text=sentence, headers={"Upgrade": UPGRADE})


async def _written(transport: asyncio.WriteTransport) -> None:
    """Until the 101 has left aiohttp's hands."""
    async with asyncio.timeout(HANDOVER_SECONDS):
        while transport.get_write_buffer_size():  # noqa: ASYNC110 - a transport has no event
            await asyncio.sleep(0)


def _own_socket(transport: asyncio.BaseTransport) -> socket.socket:
    """A second descriptor of the connection, which outlives the transport."""
    return socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))


def _peer(transport: asyncio.BaseTransport) -> str:
    host, port, *_ = transport.get_extra_info("peername") or ("a driver", 0)
    return f"driver {host}:{port}"

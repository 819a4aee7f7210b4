"""Bytes over HTTP the way fetchers want them: ETag, If-None-Match, one Range, HEAD."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass

from aiohttp import web

from expert_network.net.stream import SLOWEST

_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.IGNORECASE)
#: For a client to take an answer, and its size over SLOWEST more.
SEND_SECONDS = 30.0

_TAG = re.compile(r'(?:W/)?("[^"]*")')

#: (start, stop) -> the bytes between them, in pieces.
Source = Callable[[int, int], AsyncGenerator[bytes | memoryview, None]]


@dataclass(frozen=True)
class Content:
    """`size` bytes whose sha256 (hex) is `sha256`, read from `source` when they are sent."""

    size: int
    sha256: str
    source: Source
    kind: str = "application/octet-stream"

    @property
    def etag(self) -> str:
        """The entity tag: the sha256 in quotes."""
        return f'"{self.sha256}"'


@dataclass(frozen=True)
class Span:
    """The answer's status and the bytes [start, stop) it carries."""

    status: int
    start: int
    stop: int


def span(headers: Mapping[str, str], content: Content) -> Span:
    """What part of `content` was asked for.

    A Range that is not understood, or names several, is ignored, as RFC 9110 allows; one that is
    for another version (If-Range) too. One that lies outside gives 416.
    """
    size = content.size
    if matches(headers.get("If-None-Match", ""), content.etag):
        return Span(304, 0, 0)
    match = _RANGE.fullmatch(headers.get("Range", "").strip())
    whole = Span(200, 0, size)
    if match is None or headers.get("If-Range", content.etag) != content.etag:
        return whole
    first, last = match.groups()
    if not first:
        if not last:
            return whole
        start, stop = max(0, size - int(last)), size
    else:
        start, stop = int(first), size if not last else min(int(last) + 1, size)
        if last and int(last) < start:
            return whole
    return Span(206, start, stop) if start < stop else Span(416, 0, 0)


def matches(listed: str, etag: str) -> bool:
    """Whether an If-None-Match header names `etag`; weak tags compare like strong ones."""
    return listed.strip() == "*" or etag in _TAG.findall(listed)


async def send(request: web.Request, content: Content) -> web.StreamResponse:
    """Answer a GET or HEAD with `content`, or the part of it that was asked for.

    Raises ConnectionAbortedError, with the connection closed, if the client takes it too slowly.
    """
    part = span(request.headers, content)
    response = web.StreamResponse(status=part.status, headers=_headers(part, content))
    if part.status == 416:
        raise web.HTTPRequestRangeNotSatisfiable(
            headers={"Content-Range": f"bytes */{content.size}"},
            reason=f"there are {content.size} bytes here and none of them was asked for",
        )
    if part.status != 304:
        response.content_type = content.kind
        response.content_length = part.stop - part.start
    transport = request.transport
    try:
        async with asyncio.timeout(SEND_SECONDS + (part.stop - part.start) / SLOWEST):
            await _send(request, response, part, content)
    except TimeoutError:
        if transport is not None:
            # Closing it would wait for what has not been taken.
            transport.abort()
        raise ConnectionAbortedError("somebody takes an answer too slowly") from None
    return response


async def _send(
    request: web.Request, response: web.StreamResponse, part: Span, content: Content
) -> None:
    await response.prepare(request)
    if request.method != "HEAD" and part.status != 304:
        async with aclosing(content.source(part.start, part.stop)) as pieces:
            async for piece in pieces:
                await response.write(piece)
    await response.write_eof()


def _headers(part: Span, content: Content) -> dict[str, str]:
    headers = {"ETag": content.etag, "Accept-Ranges": "bytes"}
    if part.status == 206:
        headers["Content-Range"] = f"bytes {part.start}-{part.stop - 1}/{content.size}"
    return headers

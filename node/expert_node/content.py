"""Bytes over HTTP the way fetchers want them: ETag, If-None-Match, one Range, HEAD."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

from aiohttp import web

_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.IGNORECASE)
_TAG = re.compile(r'(?:W/)?("[^"]*")')

#: (start, stop) -> the bytes between them, in pieces.
Source = Callable[[int, int], AsyncIterator[bytes]]


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
    """Answer a GET or HEAD with `content`, or the part of it that was asked for."""
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
    await response.prepare(request)
    if request.method != "HEAD" and part.status != 304:
        async for piece in content.source(part.start, part.stop):
            await response.write(piece)
    await response.write_eof()
    return response


def _headers(part: Span, content: Content) -> dict[str, str]:
    headers = {"ETag": content.etag, "Accept-Ranges": "bytes"}
    if part.status == 206:
        headers["Content-Range"] = f"bytes {part.start}-{part.stop - 1}/{content.size}"
    return headers

"""expert_node.content: which part of some content a request asks for."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator

import pytest
from aiohttp import web

from expert_node import content as module
from expert_node.content import Content, Span, matches, send, span


async def nothing(start: int, stop: int) -> AsyncGenerator[bytes, None]:
    """A source that is never read here."""
    yield b""


CONTENT = Content(1000, "ab" * 32, nothing)
TAG = CONTENT.etag


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("", Span(200, 0, 1000)),
        ("bytes=0-99", Span(206, 0, 100)),
        ("bytes=900-", Span(206, 900, 1000)),
        ("bytes=-1", Span(206, 999, 1000)),
        ("bytes=-5000", Span(206, 0, 1000)),
        ("bytes=0-5000", Span(206, 0, 1000)),
        ("Bytes=5-5", Span(206, 5, 6)),
        ("bytes=1000-", Span(416, 0, 0)),
        ("bytes=-0", Span(416, 0, 0)),
        ("bytes=9-5", Span(200, 0, 1000)),
        ("bytes=0-1,5-6", Span(200, 0, 1000)),
        ("bytes=-", Span(200, 0, 1000)),
        ("bytes=a-b", Span(200, 0, 1000)),
        ("lines=0-1", Span(200, 0, 1000)),
        (f"bytes=0-{'9' * 30}", Span(200, 0, 1000)),
    ],
)
def test_range(asked: str, expected: Span) -> None:
    """One range is honoured and cut to the content, one beyond it is 416, all else is ignored."""
    assert span({"Range": asked}, CONTENT) == expected


def test_if_range() -> None:
    """A range of another version's bytes is answered with all of this version's."""
    headers = {"Range": "bytes=5-9", "If-Range": '"other"'}
    assert span(headers, CONTENT) == Span(200, 0, 1000)
    assert span({**headers, "If-Range": TAG}, CONTENT) == Span(206, 5, 10)


def test_not_modified_wins_over_a_range() -> None:
    """Who has these bytes already gets none of them."""
    assert span({"If-None-Match": TAG, "Range": "bytes=0-1"}, CONTENT) == Span(304, 0, 0)


@pytest.mark.parametrize(
    ("listed", "found"),
    [
        (TAG, True),
        (f"W/{TAG}", True),
        (f'"x", {TAG}', True),
        ("*", True),
        ("", False),
        ('"x"', False),
        (TAG.strip('"'), False),
    ],
)
def test_matches(listed: str, found: bool) -> None:
    """If-None-Match is a list of tags, weak or strong, or a star."""
    assert matches(listed, TAG) is found


async def test_a_client_that_stops_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who takes no bytes is let go after a while, and neither file nor connection is held."""
    monkeypatch.setattr(module, "SEND_SECONDS", 0.05)
    monkeypatch.setattr(module, "SLOWEST", 1 << 40)
    ended: list[str] = []

    async def endless(start: int, stop: int) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield bytes(1 << 20)
        finally:
            ended.append("source")

    gone: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def answer(request: web.Request) -> web.StreamResponse:
        transport = request.transport
        assert isinstance(transport, asyncio.WriteTransport)
        try:
            return await send(request, Content(1 << 40, "ab" * 32, endless))
        except ConnectionAbortedError:
            gone.set_result(transport.is_closing() and not transport.get_write_buffer_size())
            raise

    app = web.Application()
    app.add_routes([web.get("/", answer)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        with socket.create_connection(runner.addresses[0][:2]) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert await asyncio.wait_for(gone, 20)
            assert ended == ["source"]
    finally:
        await runner.cleanup()

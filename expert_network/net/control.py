"""The control plane from outside: one node's HTTP, with the key, deadlines and bounded answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any

import aiohttp
from yarl import URL

from expert_network.errors import ExpertNetworkError, KeyRefused, NodeClosed, NotANode
from expert_network.net.address import format_url, parse_url
from expert_network.net.answers import (
    MAX_ERROR_BODY,
    closed_unanswered,
    key_needed,
    key_not_proved,
    name_unknown,
    not_a_node,
    not_accepted,
    not_answered,
    refusal,
    unreachable,
)
from expert_network.net.auth import Answer, ClusterKey, KeyMemory, challenged_with

#: Seconds for a whole request but a download, and for any one read.
TOTAL = 30.0
SILENCE = 5.0
#: Bytes of JSON: the status of a node that holds a hundred thousand blocks.
MAX_JSON = 8 << 20
#: Bytes read at once; large enough that a download costs few wake-ups.
PIECE = 1 << 20
#: The one path that needs no key, and so carries no proof.
OPEN_PATH = "/health"


class ControlClient:
    """One node's control plane, an async context manager. `url` is as people type it.

    total: seconds for a request and its answer. silence: seconds for a connection, and without a
    byte. Every call raises NodeUnreachable, NodeTimeout, NodeClosed, NodeRefused (with the HTTP
    status as code), NotANode or KeyRefused.
    """

    def __init__(
        self,
        url: str,
        key: ClusterKey | None = None,
        *,
        total: float = TOTAL,
        silence: float = SILENCE,
    ) -> None:
        self.url = format_url(*parse_url(url))
        self._memory = None if key is None else KeyMemory(key)
        self.total, self.silence = total, silence

    async def __aenter__(self) -> ControlClient:
        self._session = aiohttp.ClientSession(
            cookie_jar=aiohttp.DummyCookieJar(),
            # What comes must be what was hashed: no transparent decompression, no bombs.
            auto_decompress=False,
            headers={"Accept-Encoding": "identity"},
            read_bufsize=PIECE,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._session.close()

    async def get_json(
        self, path: str, max_bytes: int = MAX_JSON, statuses: tuple[int, ...] = (200,)
    ) -> Any:
        """The JSON at `path`, an answer of one of `statuses`."""
        return self._json(path, await self.get_bytes(path, max_bytes, statuses))

    async def post_json(self, path: str, message: Any, max_bytes: int = MAX_JSON) -> Any:
        """The JSON in answer to `message` at `path`.

        The body's sha256 stands in the request's target, which is what the key proves.
        """
        body = json.dumps(message).encode()
        target = f"{path}?sha256={hashlib.sha256(body).hexdigest()}"
        headers = {"Content-Type": "application/json"}
        async with self._ask("POST", target, body, headers) as response:
            return self._json(path, await self._bounded(response, path, max_bytes))

    async def put_block(self, layer: int, expert: int, data: bytes | memoryview) -> None:
        """Give the node a block that it is to hold, with its sha256 in what the key proves."""
        if self._memory is not None:
            await self.get_json("/roster")  # a challenge, which would cost the block's bytes twice
        target = f"/block/{layer}/{expert}?sha256={hashlib.sha256(data).hexdigest()}"
        headers = {"Content-Type": "application/octet-stream"}
        async with self._ask("PUT", target, bytes(data), headers, (204,)):
            pass

    def _json(self, path: str, data: bytes) -> Any:
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise not_a_node(self.url, f"answered {path} with something that is no JSON") from error

    async def get_bytes(
        self, path: str, max_bytes: int, statuses: tuple[int, ...] = (200,)
    ) -> bytes:
        """The bytes at `path`. More than `max_bytes` raise NotANode."""
        async with self.get(path, statuses=statuses) as response:
            return await self._bounded(response, path, max_bytes)

    async def _bounded(self, response: aiohttp.ClientResponse, path: str, max_bytes: int) -> bytes:
        data = await _read(response, max_bytes + 1)
        if len(data) > max_bytes:
            raise _too_long(self.url, path, max_bytes)
        return data

    @asynccontextmanager
    async def get(
        self,
        path: str,
        headers: Mapping[str, str] | None = None,
        statuses: tuple[int, ...] = (200,),
        total: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer to read from, of one of `statuses` and from a node that knows our key.

        path: as it goes on the wire, quoted. total: seconds, for what takes longer than others.
        """
        async with self._ask("GET", path, None, headers, statuses, total) as response:
            yield response

    @asynccontextmanager
    async def _ask(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str] | None,
        statuses: tuple[int, ...] = (200,),
        total: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        seconds = self.total if total is None else total
        timeout = aiohttp.ClientTimeout(
            total=seconds, sock_connect=self.silence, sock_read=self.silence
        )
        memory = None if path == OPEN_PATH else self._memory
        answer = None if memory is None else memory.answer(method, path)
        with _Explained(self.url, seconds, self.silence):
            async with self._request(method, path, body, answer, headers, timeout) as response:
                if response.status != 401:
                    await self._accept(path, answer, response, statuses)
                    yield response
                    return
                answer = self._challenged(method, path, response)
            async with self._request(method, path, body, answer, headers, timeout) as response:
                if response.status == 401:
                    raise key_needed(self.url, given=True)
                await self._accept(path, answer, response, statuses)
                yield response

    def _request(
        self,
        method: str,
        path: str,
        body: bytes | None,
        answer: Answer | None,
        headers: Mapping[str, str] | None,
        timeout: aiohttp.ClientTimeout,
    ) -> Any:
        sent = dict(headers or {})
        if answer is not None:
            sent["Authorization"] = answer.header
        url = URL(self.url + path, encoded=True)
        return self._session.request(
            method, url, data=body, headers=sent, timeout=timeout, allow_redirects=False
        )

    def _challenged(self, method: str, path: str, response: aiohttp.ClientResponse) -> Answer:
        nonce = challenged_with(response.headers.get("WWW-Authenticate"))
        if nonce is None:
            raise not_a_node(self.url, "asks for a password, not for a cluster key")
        if self._memory is None:
            raise key_needed(self.url, given=False)
        return self._memory.challenged(method, path, nonce)

    async def _accept(
        self,
        path: str,
        answer: Answer | None,
        response: aiohttp.ClientResponse,
        statuses: tuple[int, ...],
    ) -> None:
        if response.status not in statuses:
            body = await _read(response, MAX_ERROR_BODY)
            asked = path.partition("?")[0]
            raise refusal(self.url, response.status, response.reason or "", body, asked)
        if self._memory is None or path == OPEN_PATH:
            return
        if answer is None:
            raise key_not_proved(self.url)
        try:
            self._memory.proved(answer, response.headers.get("Authentication-Info"))
        except KeyRefused as error:
            raise key_not_proved(self.url) from error


class _Explained:
    """aiohttp's errors inside, as ours."""

    def __init__(self, url: str, total: float, silence: float) -> None:
        self._url, self._total, self._silence = url, total, silence

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, (aiohttp.ClientError, TimeoutError)):
            raise self._explain(error) from error

    def _explain(self, error: BaseException) -> ExpertNetworkError:
        match error:
            case aiohttp.ConnectionTimeoutError():
                return not_accepted(self._url, self._silence)
            case aiohttp.SocketTimeoutError():
                return not_answered(self._url, self._silence)
            case TimeoutError():
                return not_answered(self._url, self._total)
            case aiohttp.ClientConnectorDNSError():
                return name_unknown(self._url, error.os_error)
            case aiohttp.ClientConnectorError():
                return unreachable(self._url, error.os_error)
            case aiohttp.ClientResponseError():
                return not_a_node(self._url, "does not answer in HTTP")
            case aiohttp.ClientPayloadError():
                problem = "closed the connection in the middle of an answer"
                return NodeClosed(self._url, problem, "check that it still runs, and its log")
            case _:
                return closed_unanswered(self._url)


async def _read(response: aiohttp.ClientResponse, most: int) -> bytes:
    """The body, or its first `most` bytes."""
    data = bytearray()
    async for piece in response.content.iter_chunked(min(PIECE, most)):
        data += piece[: most - len(data)]
        if len(data) >= most:
            break
    return bytes(data)


def _too_long(url: str, path: str, most: int) -> NotANode:
    return not_a_node(url, f"answers {path} with more than {most} bytes")

"""A model hub on this machine: the part of the API that huggingface_hub's download speaks."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler

COMMIT = hashlib.sha1(b"commit").hexdigest()


class Hub:
    """One repo, served from `folder`. `requests` lists (method, path, Range) as they come.

    `refuse` answers everything with that status and error code ("404 RepoNotFound"), or, with
    `only_files`, every file. `hold` names a file of which half is sent; then the connection stays
    silent and `held` is set. `spoil` names a file that arrives with its last byte changed, `whole`
    has ranges ignored.
    """

    def __init__(self, repo: str, folder: Path) -> None:
        self.repo, self.folder = repo, folder
        self.refuse: str | None = None
        self.only_files = False
        self.hold: str | None = None
        self.spoil: str | None = None
        self.whole = False
        self.held = threading.Event()
        self.requests: list[tuple[str, str, str | None]] = []
        self.url = ""

    def fetched(self) -> list[str]:
        """The names of the files whose bytes were asked for."""
        paths = [
            path for method, path, _ in self.requests if method == "GET" and "/resolve/" in path
        ]
        return sorted({path.rpartition("/")[2] for path in paths})

    def app(self) -> web.Application:
        """The hub as an aiohttp application."""
        app = web.Application(middlewares=[self._note])
        info = f"/api/models/{self.repo}"
        app.router.add_get(info + "/revision/{revision}", self._info)
        app.router.add_get(f"/{self.repo}/resolve/{{revision}}/{{name:.+}}", self._file)
        return app

    @web.middleware
    async def _note(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.requests.append((request.method, request.path, request.headers.get("Range")))
        if self.refuse is None or (self.only_files and "/resolve/" not in request.path):
            return await handler(request)
        status, _, code = self.refuse.partition(" ")
        return web.Response(status=int(status), headers={"X-Error-Code": code} if code else {})

    async def _info(self, request: web.Request) -> web.Response:
        if request.match_info["revision"] not in ("main", COMMIT):
            return web.Response(status=404, headers={"X-Error-Code": "RevisionNotFound"})
        files = [self._describe(path) for path in sorted(self.folder.rglob("*")) if path.is_file()]
        return web.json_response({"id": self.repo, "sha": COMMIT, "siblings": files})

    async def _file(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{name}"'}
        data = (self.folder / name).read_bytes()
        if name == self.hold:
            return await self._half(request, data, headers)
        if name == self.spoil:
            return web.Response(body=data[:-1] + bytes([data[-1] ^ 1]), headers=headers)
        if self.whole:
            return web.Response(body=data, headers=headers)
        return web.FileResponse(self.folder / name, headers=headers)

    async def _half(
        self, request: web.Request, data: bytes, headers: dict[str, str]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={**headers, "Content-Length": str(len(data))})
        await response.prepare(request)
        await response.write(data[: len(data) // 2])
        self.held.set()
        await asyncio.Event().wait()  # until the client goes away, which cancels this handler
        return response

    def _describe(self, path: Path) -> dict[str, object]:
        """What the hub's API says of a file; weights are kept in LFS, which knows their sha256."""
        name, size = path.relative_to(self.folder).as_posix(), path.stat().st_size
        described: dict[str, object] = {"rfilename": name, "size": size, "blobId": "0" * 40}
        if path.suffix == ".safetensors":
            sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
            described["lfs"] = {"size": size, "sha256": sha256, "pointerSize": 134}
        return described


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve in a thread of its own, on a free port; `hub.url` is its HF_ENDPOINT."""
    loop = asyncio.new_event_loop()
    ready, over = threading.Event(), asyncio.Event()

    async def serve() -> None:
        # A handler that holds must end when its client is gone.
        runner = web.AppRunner(hub.app(), handler_cancellation=True, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        hub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await over.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    ready.wait()
    try:
        yield hub
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()

"""The daemon's life: settle, bind, load, serve, drain. What goes on in between is elsewhere."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import click
from aiohttp import web

from expert_network.backend import Backend
from expert_network.commandline import progress
from expert_network.errors import AddressInUse, Cancelled, InputError
from expert_network.experts.partition import Partition, load_partition, partition_bytes
from expert_network.memory import available_memory
from expert_network.net.address import format_url
from expert_network.units import size
from expert_node import bootstrap, startup
from expert_node.compute import Computer
from expert_node.config import NodeConfig
from expert_node.control import application
from expert_node.holdings import Holdings
from expert_node.links import Links
from expert_node.state import SOFTWARE, NodeState, Phase, Serving
from expert_node.stopping import Stop, in_thread
from expert_protocol.frames import Welcome, WireDType
from expert_protocol.header import VERSION

log = logging.getLogger("expert_node")

BACKLOG = 128
#: For a connection to bring a request's headers: the first one's, or those after an answer.
HEADER_SECONDS = 30.0
#: For requests that are being answered once the links have ended.
HTTP_SECONDS = 1.0


def run(config: NodeConfig, backend: Backend) -> int:
    """Serve until stopped; the exit code: 0 after SIGTERM, 130 after SIGINT.

    Raises, before anything is loaded, what startup.read raises, OutOfMemory and AddressInUse; with
    peers, what bootstrap raises.
    """
    _log_to_stderr(config.log_level.upper())
    state = NodeState(phase=Phase.FETCHING) if config.peer_urls else NodeState()
    if config.peer_urls:
        startup.read_roster(config)  # a mistake in it is said before anything is fetched
    else:
        _settle(state, startup.read(config), backend)
    with listen(config.host, config.port) as listener:
        node = Node(config, backend, state, listener)
        with asyncio.Runner(loop_factory=_new_event_loop) as runner:
            return runner.run(node.live())


def _settle(state: NodeState, settled: startup.Startup, backend: Backend) -> None:
    """Go on with `settled` if its blocks fit the memory. Raises OutOfMemory."""
    needed = partition_bytes(settled.store.manifest, settled.blocks)
    startup.check_memory(settled, needed, available_memory(backend.name))
    state.startup, state.loaded = settled, (0, needed)


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s")
    # It writes a traceback for every scanner that does not speak HTTP; our own errors go to ours.
    logging.getLogger("aiohttp.server").setLevel(level if level == "DEBUG" else "CRITICAL")


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises AddressInUse, or InputError for an address that is not ours."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(host, port) from error
        reason = error.strerror or str(error)
        raise InputError(
            f"the node cannot listen on {host}:{port} ({reason}); give --host an address of this "
            "machine and --port a free port above 1023."
        ) from error


class Node:
    """One running node."""

    def __init__(
        self, config: NodeConfig, backend: Backend, state: NodeState, listener: socket.socket
    ) -> None:
        self._config, self._backend, self._state, self._listener = config, backend, state, listener
        self._stop = Stop()

    async def live(self) -> int:
        """From the first request to the last; the exit code."""
        self._stop.listen(self._config.stop_at_eof)
        async with self._http():
            serving = await self._load() if await self._fetch() else None
            if serving is not None:
                self._say_ready(serving)
                await self._stop.asked.wait()
                await self._drain(serving)
        return self._stop.code

    @asynccontextmanager
    async def _http(self) -> AsyncIterator[None]:
        runner = web.AppRunner(
            application(self._state, self._config.key),
            access_log=None,
            handle_signals=False,
            keepalive_timeout=HEADER_SECONDS,
            shutdown_timeout=HTTP_SECONDS,
            lingering_time=0,  # no request here has a body to wait for
        )
        await runner.setup()
        try:
            await web.SockSite(runner, self._listener).start()
            yield
        finally:
            await runner.cleanup()

    async def _fetch(self) -> bool:
        """Fetch what the store lacks from peers; whether the node goes on: not if it was stopped.

        What is verified by then stays.
        """
        if not self._config.peer_urls:
            return True
        fetching = asyncio.ensure_future(self._bootstrap())
        stopped = asyncio.ensure_future(self._stop.asked.wait())
        try:
            await asyncio.wait({fetching, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if fetching.done():
                fetching.result()
                return True
            log.info("stopped while fetching")
            return False
        finally:
            for task in (fetching, stopped):
                task.cancel()
            await asyncio.gather(fetching, stopped, return_exceptions=True)

    async def _bootstrap(self) -> None:
        config, state = self._config, self._state
        confirm = self._confirm if sys.stdin.isatty() and sys.stderr.isatty() else None
        path = startup.store_path(config)
        # Before a bar is drawn over the question.
        digest = await bootstrap.agreed_digest(config, path, confirm)
        with progress(sys.stderr) as report:

            def fetched(done: int, total: int, what: str) -> None:
                state.loaded = (done, total)
                report(done, total, what)

            store = await bootstrap.fetch_files(config, path, digest, fetched)
            roster = startup.read_roster(config)
            settled = await asyncio.to_thread(startup.settle, config.me, roster, store)
            _settle(state, settled, self._backend)
            await bootstrap.fetch_partition(config, settled, fetched)
        _settle(state, settled, self._backend)
        state.phase = Phase.LOADING

    async def _confirm(self, question: str) -> bool:
        return await in_thread(partial(click.confirm, question, err=True))

    async def _load(self) -> Serving | None:
        """Load the blocks; None if the node was told to stop meanwhile."""
        try:
            partition = await in_thread(self._load_partition)
        except Cancelled:
            log.info("stopped while loading")
            return None
        settled, state = self._state.settled, self._state
        manifest = settled.store.manifest
        room = partial(available_memory, self._backend.name)
        computer = Computer(settled.name, partition, manifest.shape, state.counters)
        links = Links(
            self._welcome(partition),
            manifest.model_type,
            computer,
            state.counters,
            lambda layer: manifest.layer(layer).hidden,
            holdings=Holdings(settled.name, settled.store, computer, self._config.key, room),
        )
        state.serving, state.phase = Serving(partition, links), Phase.OK
        return state.serving

    def _load_partition(self) -> Partition:
        settled = self._state.settled
        with progress(sys.stderr) as report:

            def loaded(done: int, total: int, what: str) -> None:
                if self._stop.asked.is_set():
                    raise Cancelled("stopped while loading")
                self._state.loaded = (done, total)
                report(done, total, what)

            return load_partition(settled.store, settled.blocks, self._backend, loaded)

    def _welcome(self, partition: Partition) -> Welcome:
        settled = self._state.settled
        return Welcome(
            protocol=VERSION,
            node=settled.name,
            model_digest=settled.store.digest,
            roster=settled.roster.to_wire(),
            roster_digest=settled.roster.digest,
            epoch=settled.roster.epoch,
            numerics=partition.numerics,
            compute_dtype=partition.compute_dtype,
            dtypes=tuple(WireDType),
            software=SOFTWARE,
        )

    def _say_ready(self, serving: Serving) -> None:
        settled, partition = self._state.settled, serving.partition
        url = format_url(self._config.host, self._listener.getsockname()[1])
        if not partition.blocks:
            log.warning("the roster gives node %s no block; it serves files only", settled.name)
        print(
            f"expert-node {settled.name} ready on {url}: {partition.blocks} of "
            f"{settled.store.manifest.block_count} blocks, {size(partition.nbytes)}",
            flush=True,
        )

    async def _drain(self, serving: Serving) -> None:
        """End the links, the dispatches at hand first, for as long as was asked or until forced."""
        name, seconds = self._state.settled.name, self._config.drain_seconds
        self._state.phase = Phase.DRAINING
        log.info("node %s is draining %d links", name, len(serving.links))
        reason = f"node {name} is shutting down"
        drained = asyncio.ensure_future(in_thread(partial(serving.links.drain, reason, seconds)))
        forced = asyncio.ensure_future(self._stop.forced.wait())
        await asyncio.wait({drained, forced}, return_when=asyncio.FIRST_COMPLETED)
        forced.cancel()
        cut = drained.result() if drained.done() else serving.links.cut()
        if cut:
            log.warning("%d links were cut off before their dispatch was done", cut)

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

from aiohttp import web

from expert_network.backend import Backend
from expert_network.commandline import progress
from expert_network.errors import AddressInUse, Cancelled, ExpertNetworkError, InputError
from expert_network.experts.partition import Partition, load_partition, partition_bytes
from expert_network.memory import available_memory
from expert_network.net.address import format_url
from expert_network.progress import Progress
from expert_network.units import size
from expert_node import bootstrap, startup
from expert_node.compute import Computer
from expert_node.config import NodeConfig
from expert_node.control import application
from expert_node.gaining import Gaining
from expert_node.holdings import Holdings
from expert_node.joining import NEWS_S, Joining, own_url
from expert_node.links import Links
from expert_node.membership import Membership
from expert_node.state import SOFTWARE, NodeState, Phase, Serving
from expert_node.stopping import Stop, in_thread
from expert_node.strangers import Strangers
from expert_protocol.frames import Welcome, WireDType
from expert_protocol.header import VERSION
from expert_roster.roster import Roster

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
        self._joining: Joining | None = None

    async def live(self) -> int:
        """From the first request to the last; the exit code."""
        self._stop.listen(self._config.stop_at_eof)
        async with self._http():
            serving = await self._load() if await self._fetch() else None
            if serving is not None:
                async with self._member(serving.membership):
                    if await self._join():
                        self._state.phase = Phase.OK
                        self._say_ready(serving)
                        await self._until(self._stop.asked)
                        await self._leave()
                    await self._drain(serving)
        return self._stop.code

    @asynccontextmanager
    async def _member(self, membership: Membership) -> AsyncIterator[None]:
        """With the membership at work."""
        self._membership = asyncio.create_task(membership.run())
        try:
            yield
        finally:
            self._membership.cancel()
            await asyncio.wait({self._membership})

    async def _until(self, *events: asyncio.Event) -> None:
        """Until one of these is set. Raises what the membership fails with, a bug."""
        waiting = {asyncio.ensure_future(event.wait()) for event in events}
        try:
            await asyncio.wait({*waiting, self._membership}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for future in waiting:
                future.cancel()
        if self._membership.done():
            self._membership.result()

    async def _join(self) -> bool:
        """With --join: be in the roster. False if the node was told to stop meanwhile."""
        if self._joining is None:
            return True
        with progress(sys.stderr) as report:
            told = partial(_gained, report)
            joined = asyncio.ensure_future(self._joining.join(told))
            return await self._unless(self._stop.asked, joined)

    async def _leave(self) -> None:
        """With --join: out of the roster first, as long as that may take, or until forced."""
        if self._joining is None:
            return
        seconds = self._config.handover_seconds
        left = asyncio.ensure_future(self._joining.leave(seconds))
        try:
            async with asyncio.timeout(seconds):
                if await self._unless(self._stop.forced, left):
                    serving = self._state.serving
                    assert serving is not None
                    await in_thread(partial(serving.links.wait_for_none, NEWS_S))
        except (ExpertNetworkError, TimeoutError) as error:
            why = str(error) or f"it takes longer than {seconds:g} s"
            log.warning("node %s ends without handing over: %s", self._config.me, why)

    async def _unless(self, event: asyncio.Event, task: asyncio.Future[None]) -> bool:
        """Whether `task` was done before `event` was set; raises what it raised."""
        over = asyncio.Event()
        task.add_done_callback(lambda _: over.set())
        try:
            await self._until(event, over)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        if task.cancelled():
            return False
        task.result()
        return True

    @asynccontextmanager
    async def _http(self) -> AsyncIterator[None]:
        strangers = Strangers()
        runner = web.AppRunner(
            application(self._state, self._config.key, strangers.know),
            access_log=None,
            handle_signals=False,
            keepalive_timeout=HEADER_SECONDS,
            shutdown_timeout=HTTP_SECONDS,
            lingering_time=0,  # no request here has a body to wait for
        )
        await runner.setup()
        strangers.make = runner.server
        loop = asyncio.get_running_loop()
        server = await loop.create_server(strangers, sock=self._listener, backlog=BACKLOG)
        try:
            yield
        finally:
            server.close()
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
        path = startup.store_path(config)
        # Before a bar is drawn over the question.
        digest = await bootstrap.agreed_digest(config, path, startup.confirm())
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
        key, backend = self._config.key, self._backend.name
        gaining = Gaining(settled.store, partition, computer, links, backend, key)
        membership = Membership(
            settled.name,
            manifest.digest,
            manifest.shape,
            settled.roster,
            gaining,
            partial(self._flipped, partition, links),
            key,
            settled.addresses,
            self._config.peer_urls,
        )
        if self._config.join is not None:
            self._joining = Joining(
                membership, manifest.digest, self._config.weight, self._url(), key
            )
        else:
            state.phase = Phase.OK
        state.serving = Serving(partition, links, membership)
        return state.serving

    def _flipped(self, partition: Partition, links: Links, roster: Roster) -> None:
        self._state.flipped(roster)
        links.announce(self._welcome(partition))

    def _url(self) -> str:
        """How others reach this node."""
        port = self._listener.getsockname()[1]
        towards = next(iter(self._state.settled.addresses.values()))
        return self._config.url or own_url(self._config.host, port, towards)

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


def _gained(report: Progress, done: int, total: int) -> None:
    report(done, total, "taking blocks over")

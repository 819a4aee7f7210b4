"""expert_node.control over real HTTP, in this process, with a store and partition made by hand."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import shutil
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from yarl import URL

from expert_network.errors import KeyRefused, NodeRefused, NotOwned
from expert_network.experts.partition import Partition
from expert_network.net.auth import ClusterKey, KeyMemory, challenged_with
from expert_network.net.control import ControlClient
from expert_network.net.rosters import Seat, ask
from expert_network.store.reader import Store
from expert_node import handover
from expert_node.compute import Computer
from expert_node.control import PIECE, application
from expert_node.handover import UPGRADE
from expert_node.links import Links
from expert_node.membership import Blocks, Membership
from expert_node.startup import Startup
from expert_node.state import NodeState, Phase, Serving
from expert_roster.rendezvous import partition
from expert_roster.roster import Roster
from tests.support.stores import block, flip, write_store
from tests.support.wire import welcome

ROSTER = Roster.parse("a,b")
BIG = bytes(range(256)) * (PIECE // 256 * 2) + b"end"  # three pieces


class FakePartition:
    """Says that it holds node a's blocks; their bytes are reversed, to be told from the disk's."""

    numerics, compute_dtype = "made-up", "float32"
    kernels = "native avx2, int8 (f32 when asked)"

    def __init__(self, blocks: dict[int, Any]) -> None:
        self._blocks = blocks
        self.blocks, self.nbytes = sum(map(len, blocks.values())), 4096

    def owned(self, layer: int) -> Any:
        return self._blocks[layer]

    def holds(self, layer: int, expert: int) -> bool:
        return expert in self._blocks[layer]

    def block_bytes(self, layer: int, expert: int) -> bytes:
        if layer not in self._blocks or not self.holds(layer, expert):
            raise NotOwned(layer, expert)
        return block(layer, expert)[::-1]


class FakeMover:
    """Has every block."""

    fetched = drivers = 0

    def missing(self, blocks: Blocks) -> int:
        return 0

    async def gain(self, blocks: Blocks, *rest: Any) -> None:
        return

    async def release(self, kept: Callable[[], Blocks]) -> None:
        return


@pytest.fixture
def state(tmp_path: Path) -> NodeState:
    """Node a of a,b: loaded, with a store of two layers of three experts."""
    write_store(tmp_path / "store", files={"big.json": BIG})
    store = Store.open(tmp_path / "store")
    blocks = partition(ROSTER, "a", store.manifest.shape)
    state = NodeState(Startup("a", ROSTER, store, blocks))
    held = cast(Partition, FakePartition(blocks))
    computer = Computer("a", held, store.manifest.shape, state.counters)
    links = Links(welcome(), "made_up", computer, state.counters, lambda layer: 64)
    membership = Membership(
        "a", store.digest, store.manifest.shape, ROSTER, FakeMover(), lambda roster: None
    )
    state.serving, state.phase = Serving(held, links, membership), Phase.OK
    return state


@asynccontextmanager
async def served(
    state: NodeState, key: ClusterKey | None = None
) -> AsyncIterator[aiohttp.ClientSession]:
    """A session whose base URL is the node's."""
    runner = web.AppRunner(application(state, key), access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        async with aiohttp.ClientSession(f"http://{host}:{port}") as session:
            yield session
    finally:
        await runner.cleanup()


async def refused(session: aiohttp.ClientSession, path: str, status: int) -> str:
    """The sentence of a GET that is answered with `status`."""
    async with session.get(path) as answer:
        assert answer.status == status
        assert answer.content_type == "application/json"
        return cast(str, (await answer.json())["error"])


def split(state: NodeState) -> tuple[tuple[int, int], tuple[int, int]]:
    """A block that a holds and one that it does not."""
    experts = dict(state.settled.store.manifest.shape)
    owned = state.settled.blocks
    blocks = [(layer, expert) for layer in experts for expert in range(experts[layer])]
    held = next(b for b in blocks if b[1] in owned[b[0]])
    other = next(b for b in blocks if b[1] not in owned[b[0]])
    return held, other


async def test_health(state: NodeState) -> None:
    """/health is 200 while the node serves, and 503 before and after."""
    async with served(state) as session:
        for phase, status in ((Phase.OK, 200), (Phase.LOADING, 503), (Phase.DRAINING, 503)):
            state.phase = phase
            async with session.get("/health") as answer:
                assert (answer.status, await answer.json()) == (status, {"status": phase.value})


async def test_while_loading(state: NodeState) -> None:
    """Before the blocks are in memory, links and status are refused with how far it is."""
    state.serving, state.phase, state.loaded = None, Phase.LOADING, (10**9, 4 * 10**9)
    async with served(state) as session:
        for path in ("/status", "/link"):
            sentence = await refused(session, path, 503)
            assert sentence == "node a is loading its blocks, 1.0 GB of 4.0 GB"
        async with session.get("/manifest") as answer:
            assert answer.status == 200


async def test_manifest(state: NodeState) -> None:
    """/manifest gives the canonical bytes; its ETag is the model digest; 304 for who has it."""
    manifest = state.settled.store.manifest
    async with served(state) as session:
        async with session.get("/manifest") as answer:
            assert await answer.read() == manifest.to_bytes()
            assert answer.headers["ETag"] == f'"{manifest.digest}"'
            assert answer.content_type == "application/json"
        headers = {"If-None-Match": f'"{manifest.digest}"'}
        async with session.get("/manifest", headers=headers) as answer:
            assert (answer.status, await answer.read()) == (304, b"")


async def test_block_from_memory(state: NodeState) -> None:
    """A block of the partition comes from memory, whatever has become of the disk."""
    (layer, expert), _ = split(state)
    store = state.settled.store
    flip(store.path / store.manifest.layer(layer).file, 0)
    async with served(state) as session, session.get(f"/block/{layer}/{expert}") as answer:
        assert await answer.read() == block(layer, expert)[::-1]
        assert answer.headers["ETag"] == f'"{store.manifest.layer(layer).sha256[expert]}"'
        assert answer.content_length == len(block(layer, expert))


async def test_block_from_disk(state: NodeState) -> None:
    """A block of another node comes from the store, if it is there and sound."""
    _, (layer, expert) = split(state)
    async with served(state) as session, session.get(f"/block/{layer}/{expert}") as answer:
        assert await answer.read() == block(layer, expert)
        assert hashlib.sha256(block(layer, expert)).hexdigest() in answer.headers["ETag"]


async def test_block_that_is_not_here(state: NodeState) -> None:
    """A block that is not in the store, or damaged there, is 404, and its owner is named."""
    _, (layer, expert) = split(state)
    spec = state.settled.store.manifest.layer(layer)
    flip(state.settled.store.path / spec.file, spec.offset(expert) + 5)
    async with served(state) as session:
        sentence = await refused(session, f"/block/{layer}/{expert}", 404)
    assert sentence == f"node a has no block ({layer}, {expert}); the roster gives it to b"


async def test_proof(state: NodeState) -> None:
    """A proof is the sha256 of the nonce and the bytes in memory, whatever the disk holds."""
    (layer, expert), _ = split(state)
    nonce = bytes(range(16))
    path = f"/block/{layer}/{expert}/proof?nonce={nonce.hex()}"
    async with served(state) as session, session.get(path) as answer:
        expected = hashlib.sha256(nonce + block(layer, expert)[::-1]).hexdigest()
        assert await answer.json() == {"proof": expected}


@pytest.mark.parametrize("nonce", ["", "00" * 15, "00" * 65, "0" * 33, "AB" * 16, "é" * 32])
async def test_bad_nonces(state: NodeState, nonce: str) -> None:
    """A nonce of another length, or no hexadecimal, is refused with what it should be."""
    (layer, expert), _ = split(state)
    async with served(state) as session:
        sentence = await refused(session, f"/block/{layer}/{expert}/proof?nonce={nonce}", 400)
    assert sentence.startswith("a nonce has 16 to 64 bytes")


async def test_nothing_to_prove(state: NodeState) -> None:
    """What is not in memory is not proved, though the disk has it; nor before there is memory."""
    _, (layer, expert) = split(state)
    query = f"proof?nonce={'00' * 16}"
    async with served(state) as session:
        for where in (f"{layer}/{expert}", "9/0", "0/99999"):
            sentence = await refused(session, f"/block/{where}/{query}", 404)
            assert sentence == f"node a has no block ({where.replace('/', ', ')}) in memory"
        state.serving, state.phase = None, Phase.LOADING
        assert "is loading" in await refused(session, f"/block/{layer}/{expert}/{query}", 503)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/block/0/3", "no block (0, 3)"),
        ("/block/9/0", "no block (9, 0)"),
        ("/block/0/99999", "no block (0, 99999)"),
        ("/block/0/x", "nothing at /block/0/x"),
        ("/file/absent.json", "no file 'absent.json'"),
        ("/file/manifest.json", "no file 'manifest.json'"),
        ("/file/..%2F..%2Fetc%2Fpasswd", "no file '../../etc/passwd'"),
        ("/file/bin%2Flayer_00.bin", "no file 'bin/layer_00.bin'"),
        ("/", "nothing at /"),
    ],
)
async def test_what_there_is_not(state: NodeState, path: str, words: str) -> None:
    """What the manifest does not list does not exist, on whatever path it is asked for."""
    async with served(state) as session, session.get(URL(path, encoded=True)) as answer:
        assert answer.status == 404
        assert words in (await answer.json())["error"]


async def test_file(state: NodeState) -> None:
    """A file comes whole, its ETag from the manifest."""
    async with served(state) as session, session.get("/file/big.json") as answer:
        assert await answer.read() == BIG
        assert answer.headers["ETag"] == f'"{hashlib.sha256(BIG).hexdigest()}"'
        assert answer.headers["Accept-Ranges"] == "bytes"


async def test_range(state: NodeState) -> None:
    """A range that crosses pieces comes exactly, with 206 and where it lies."""
    first, last = PIECE - 10, 2 * PIECE + 1
    async with served(state) as session:
        headers = {"Range": f"bytes={first}-{last}"}
        async with session.get("/file/big.json", headers=headers) as answer:
            assert answer.status == 206
            assert await answer.read() == BIG[first : last + 1]
            assert answer.headers["Content-Range"] == f"bytes {first}-{last}/{len(BIG)}"
        async with session.get("/file/big.json", headers={"Range": "bytes=99999999-"}) as answer:
            assert answer.status == 416
            assert answer.headers["Content-Range"] == f"bytes */{len(BIG)}"
            assert "error" in await answer.json()


@pytest.mark.parametrize("path", ["/file/big.json", "/block/0/0", "/manifest", "/health"])
async def test_head(state: NodeState, path: str) -> None:
    """HEAD says what GET would, without the bytes."""
    async with served(state) as session:
        async with session.get(path) as whole:
            size = len(await whole.read())
        async with session.head(path) as answer:
            assert answer.status == 200
            assert int(answer.headers["Content-Length"]) == size
            assert answer.headers.get("ETag") == whole.headers.get("ETag")
        async with session.get(path) as again:
            assert len(await again.read()) == size


async def test_a_file_that_shrinks_while_it_is_sent(state: NodeState) -> None:
    """A file cut short under our hands ends the connection: nobody takes it for whole."""
    path = state.settled.store.path / "big.json"
    path.write_bytes(BIG[:1000])
    async with served(state) as session, session.get("/file/big.json") as answer:
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()


async def test_status(state: NodeState) -> None:
    """/status says who this is and what it holds, in JSON."""
    async with served(state) as session, session.get("/status") as answer:
        status = json.loads(await answer.read())
    assert status["name"] == "a"
    assert Roster.from_wire(status["roster"]) == ROSTER
    assert status["roster"]["digest"] == ROSTER.digest
    assert status["partition"]["layers"]["0"] == state.settled.blocks[0].tolist()
    assert status["partition"]["total_blocks"] == 6
    assert status["trunk"] is True
    assert status["kernels"] == "native avx2, int8 (f32 when asked)"


async def test_metrics(state: NodeState) -> None:
    """/metrics is Prometheus' text format."""
    state.counters.computed(2, 5, 0.0, 0.001)
    async with served(state) as session, session.get("/metrics") as answer:
        text = await answer.text()
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert "expert_node_pairs_total 5.0" in text
    assert f'model_digest="{state.settled.store.digest}"' in text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
async def test_only_get(state: NodeState, method: str) -> None:
    """Nothing but a roster can be changed over HTTP."""
    async with served(state) as session, session.request(method, "/status") as answer:
        assert answer.status == 405
        assert "use GET" in (await answer.json())["error"]


@pytest.mark.parametrize("path, status", [("/health", 200), ("/elsewhere", 404)])
async def test_expectations_are_not_met(state: NodeState, path: str, status: int) -> None:
    """An Expect header changes nothing, whatever bytes are in it."""
    async with served(state) as session:
        url = session._base_url
        assert url is not None
        reader, writer = await asyncio.open_connection(url.host, url.port)
        head = f"GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nExpect: 100-continu"
        writer.write(head.encode() + b"\xe3\r\n\r\n")
        assert (await reader.readline()).split()[1] == str(status).encode()
        writer.close()


async def test_a_bug_of_ours(state: NodeState, caplog: pytest.LogCaptureFixture) -> None:
    """An exception in a handler is a sentence to the client and a traceback in the log."""
    state.serving = cast(Serving, object())
    async with served(state) as session:
        assert "its log says why" in await refused(session, "/status", 500)
    assert "GET /status failed" in caplog.text


# The hand-over to a link


async def upgrade(session: aiohttp.ClientSession) -> socket.socket:
    """A connection on which an Upgrade has been asked for."""
    assert session._base_url is not None and session._base_url.port is not None
    sock = socket.create_connection(("127.0.0.1", session._base_url.port))
    sock.setblocking(False)
    lines = ["GET /link HTTP/1.1", "Host: x", "Connection: Upgrade", f"Upgrade: {UPGRADE}", "", ""]
    await asyncio.get_running_loop().sock_sendall(sock, "\r\n".join(lines).encode())
    return sock


async def everything(sock: socket.socket) -> bytes:
    """What comes on a connection until it ends."""
    data, loop = b"", asyncio.get_running_loop()
    while more := await asyncio.wait_for(loop.sock_recv(sock, 4096), 20):
        data += more
    return data


async def test_a_driver_that_leaves_during_the_hand_over(
    state: NodeState, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A connection that is lost after the 101 gets no second answer and no traceback."""
    serving = state.serving
    assert serving is not None

    async def lost(transport: asyncio.WriteTransport) -> None:
        raise TimeoutError

    monkeypatch.setattr(handover, "_written", lost)
    async with served(state) as session:
        with await upgrade(session) as sock:
            assert (await everything(sock)).count(b"HTTP/1.1") <= 1
    assert "Traceback" not in caplog.text
    assert serving.links._places == 0


async def test_hand_overs_at_the_same_time(
    state: NodeState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upgrades that are all under way at once do not become more links than there is room for."""
    serving = state.serving
    assert serving is not None
    limits = serving.links.limits
    room, go = limits.links + limits.refusals, asyncio.Event()
    written = handover._written

    async def held(transport: asyncio.WriteTransport) -> None:
        await written(transport)
        await go.wait()

    monkeypatch.setattr(handover, "_written", held)
    async with served(state) as session:
        sockets = [await upgrade(session) for _ in range(room + 1)]
        loop = asyncio.get_running_loop()
        heads = [await asyncio.wait_for(loop.sock_recv(sock, 4096), 20) for sock in sockets]
        assert [head[9:12] for head in heads] == [b"101"] * room + [b"503"]
        go.set()
        for sock in sockets:
            sock.close()


# The cluster key


@pytest.fixture
def key() -> Iterator[ClusterKey]:
    yield ClusterKey.generate()


@pytest.mark.parametrize(
    "path", ["/status", "/manifest", "/block/0/0", "/file/big.json", "/metrics", "/link", "/x"]
)
async def test_nothing_without_the_key(state: NodeState, key: ClusterKey, path: str) -> None:
    """With a key every path but /health answers 401 with a challenge, existing or not."""
    async with served(state, key) as session, session.get(path) as answer:
        assert answer.status == 401
        assert answer.headers["WWW-Authenticate"].startswith('ExpertKey nonce="')
        assert "needs the cluster key" in (await answer.json())["error"]


async def test_health_needs_no_key(state: NodeState, key: ClusterKey) -> None:
    """Whoever watches the node need not hold the key."""
    async with served(state, key) as session, session.get("/health") as answer:
        assert answer.status == 200


def nonce_of(challenge: aiohttp.ClientResponse) -> str:
    nonce = challenged_with(challenge.headers["WWW-Authenticate"])
    assert nonce is not None
    return nonce


async def authorised(
    session: aiohttp.ClientSession, memory: KeyMemory, path: str
) -> tuple[int, bytes]:
    """GET with the key: challenge, answer, and the node's own proof checked."""
    answer = memory.answer("GET", path)
    if answer is None:
        async with session.get(path) as challenge:
            answer = memory.challenged("GET", path, nonce_of(challenge))
    async with session.get(path, headers={"Authorization": answer.header}) as response:
        if response.status != 401:
            memory.proved(answer, response.headers.get("Authentication-Info"))
        return response.status, await response.read()


async def test_with_the_key(state: NodeState, key: ClusterKey) -> None:
    """Who holds the key is let in, and the node proves that it does, errors included."""
    memory = KeyMemory(key)
    async with served(state, key) as session:
        assert (await authorised(session, memory, "/file/big.json?a=b"))[1] == BIG
        assert (await authorised(session, memory, "/block/0/9"))[0] == 404


async def test_wrong_key(state: NodeState, key: ClusterKey) -> None:
    """Another key is refused, and a node of another key is found out."""
    async with served(state, key) as session:
        assert (await authorised(session, KeyMemory(ClusterKey.generate()), "/status"))[0] == 401
    with pytest.raises(KeyRefused):
        async with served(state) as session:
            await authorised_blindly(session, KeyMemory(key))


async def authorised_blindly(session: aiohttp.ClientSession, memory: KeyMemory) -> None:
    """Send an answer to a node that asked for none."""
    answer = memory.challenged("GET", "/status", "00")
    async with session.get("/status", headers={"Authorization": answer.header}) as response:
        memory.proved(answer, response.headers.get("Authentication-Info"))


async def test_an_answer_is_good_once(state: NodeState, key: ClusterKey) -> None:
    """A recorded request cannot be sent again, and not for another path."""
    async with served(state, key) as session:
        async with session.get("/status") as challenge:
            answer = KeyMemory(key).challenged("GET", "/status", nonce_of(challenge))
        headers = {"Authorization": answer.header}
        async with session.get("/manifest", headers=headers) as response:
            assert response.status == 401
        statuses = []
        for _ in range(2):
            async with session.get("/status", headers=headers) as response:
                statuses.append(response.status)
    assert statuses == [200, 401]


async def test_blocks_are_sent_a_few_at_a_time(state: NodeState) -> None:
    """Many requests for blocks at once are all answered."""
    async with served(state) as session:

        async def size(expert: int) -> int:
            async with session.get(f"/block/1/{expert}") as answer:
                return len(await answer.read())

        sizes = await asyncio.gather(*(size(n % 3) for n in range(30)))
    assert set(sizes) == {len(block(1, 0))}


def test_fake_partition_is_node_a(state: NodeState) -> None:
    """The made-up partition stands for what the roster gives node a."""
    assert np.array_equal(state.settled.blocks[0], partition(ROSTER, "a", [(0, 3)])[0])


async def test_while_it_fetches(state: NodeState, tmp_path: Path) -> None:
    """A node gives the blocks that it has verified by now, and says of the others who owns them."""
    whole, settled = state.settled.store, state.settled
    shutil.copytree(whole.path, tmp_path / "part", ignore=shutil.ignore_patterns("bin"))
    part = Store.open(tmp_path / "part", blocks=False)
    part.make_room()
    part.keep(1, 2, block(1, 2))
    fetching = NodeState(replace(settled, store=part), phase=Phase.FETCHING, loaded=(10, 2000))
    async with served(fetching) as session:
        for path, status, said in (
            ("/health", 503, b'"fetching"'),
            ("/manifest", 200, part.manifest.to_bytes()),
            ("/block/1/2", 200, block(1, 2)),
            ("/block/1/1", 404, b"no block (1, 1); the roster gives it to "),
            ("/status", 503, b"node a is fetching its blocks, 10 B of 2.0 KB"),
        ):
            async with session.get(path) as answer:
                assert (answer.status, said in await answer.read()) == (status, True), path


async def test_before_there_is_a_manifest() -> None:
    """Until it knows what it is part of, a node says that it has nothing yet."""
    async with served(NodeState(phase=Phase.FETCHING)) as session:
        async with session.get("/health") as answer:
            assert (answer.status, await answer.json()) == (503, {"status": "fetching"})
        for path in ("/manifest", "/block/0/0", "/file/config.json", "/status", "/metrics"):
            async with session.get(path) as answer:
                assert answer.status == 503 and answer.headers["Retry-After"] == "1"
                assert "is fetching its manifest" in (await answer.json())["error"]


def proposal(state: NodeState, text: str = "a,b,c", epoch: int = 1) -> dict[str, Any]:
    roster = Roster(Roster.parse(text).nodes, 1, epoch)
    return {
        "model": state.settled.store.digest,
        "roster": {**roster.to_wire(), "digest": roster.digest},
        "proposer": "ann",
        "addresses": {"a": "http://a:8301"},
    }


async def test_a_roster_is_proposed_and_committed(state: NodeState) -> None:
    """With the key a roster can be proposed, cancelled and committed; GET /roster shows it."""
    key = ClusterKey.generate()
    assert state.serving is not None
    asked, membership = proposal(state), state.serving.membership
    order = {name: asked["roster"][name] for name in ("epoch", "digest")}
    task = asyncio.create_task(membership.run())
    async with served(state, key) as session, ControlClient(str(session._base_url), key) as client:
        assert (await ask(client)).pending is None
        seat = Seat.read("x", await client.post_json("/roster/propose", asked))
        assert seat.pending is not None and seat.pending.ready and seat.pending.proposer == "ann"
        assert (await ask(client)).order == (0, ROSTER.digest)
        await client.post_json("/roster/cancel", order)
        with pytest.raises(NodeRefused, match="was not proposed this roster"):
            await client.post_json("/roster/commit", order)
        await client.post_json("/roster/propose", asked)
        await client.post_json("/roster/commit", order)
        seat = await ask(client)
        assert seat.order == (1, order["digest"]) and seat.addresses == {"a": "http://a:8301"}
        with pytest.raises(NodeRefused, match="is at epoch 1 already") as refused:
            await client.post_json("/roster/propose", proposal(state, "a,b", 1))
        assert refused.value.code == 409
    task.cancel()
    await asyncio.wait({task})


async def test_a_body_is_what_was_proved(state: NodeState) -> None:
    """A body without its sha256 in the query, of another type, or no JSON, changes nothing."""
    body = json.dumps(proposal(state)).encode()
    right = hashlib.sha256(body).hexdigest()
    kind = {"Content-Type": "application/json"}
    async with served(state) as session:
        for path, data, headers, status in (
            ("/roster/propose", body, kind, 400),
            (f"/roster/propose?sha256={right}", body + b" ", kind, 400),
            (f"/roster/propose?sha256={right}", body, {"Content-Type": "text/plain"}, 415),
            (f"/roster/propose?sha256={hashlib.sha256(b'{').hexdigest()}", b"{", kind, 400),
            (f"/roster/propose?sha256={hashlib.sha256(b'{}').hexdigest()}", b"{}", kind, 409),
            (f"/roster/commit?sha256={hashlib.sha256(b'{}').hexdigest()}", b"{}", kind, 409),
        ):
            async with session.post(path, data=data, headers=headers) as answer:
                assert answer.status == status, path
                assert (await answer.json())["error"]
        async with session.post(
            "/roster/propose", data=io.BytesIO(b"x" * (3 << 20)), headers=kind
        ) as answer:
            assert answer.status == 413
        async with session.get("/roster/propose") as answer:
            assert answer.status == 404
    assert state.serving is not None and state.serving.membership.seat()["pending"] is None

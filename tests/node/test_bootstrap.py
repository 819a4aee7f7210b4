"""expert-node --peers: from an empty folder to a node that answers, whatever peers do."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from time import monotonic
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from expert_driver.chaos.faults import Throttle
from expert_driver.chaos.proxy import HOST, FaultProxy
from expert_network import disk
from expert_network.net.fetch import fetch_store
from expert_network.store.reader import Store
from expert_roster.rendezvous import partition
from expert_roster.roster import Roster
from tests.support.nodes import NodeProcess, node_command, node_processes, run_node
from tests.support.servers import serving, unused_port
from tests.support.small_disk import small_disk
from tests.support.stores import flip

ROSTER = "a,b,c"


@pytest.fixture(scope="module")
def peers(store: Store) -> Iterator[list[NodeProcess]]:
    """Nodes a and b with a whole store. Not to be stopped."""
    with node_processes("a,b", store.path) as nodes:
        yield nodes


def urls(nodes: list[NodeProcess]) -> str:
    return ",".join(node.url for node in nodes)


@contextmanager
def joining(store: Path, peers: str, *options: str, me: str = "c") -> Iterator[NodeProcess]:
    """A node that begins with what is at `store`."""
    node = NodeProcess(node_command(ROSTER, me, store, "--peers", peers, *options))
    try:
        yield node
    finally:
        node.close()


def owned(store: Store, me: str = "c") -> dict[int, list[int]]:
    found = partition(Roster.parse(ROSTER), me, store.manifest.shape)
    return {layer: experts.tolist() for layer, experts in found.items()}


def ends(*arguments: str | Path) -> str:
    """Run node c to its end, which is an error; the last line on stderr."""
    base = ["--roster", ROSTER, "--me", "c", "--port", "0", "--store"]
    done = run_node(*base, *map(str, arguments))
    assert done.returncode in (3, 4, 5), done.stderr
    return done.stderr.splitlines()[-1]


def test_from_nothing(store: Store, peers: list[NodeProcess], tmp_path: Path) -> None:
    """An empty folder becomes a store of trunk and own blocks alone, and the node answers."""
    (tmp_path / "empty").mkdir()
    with joining(tmp_path / "empty", urls(peers)) as node:
        node.wait_ready()
        layers = node.get("/status")["partition"]["layers"]
        made = Store.open(tmp_path / "empty")
        assert layers == {str(n): ids for n, ids in owned(store).items()}
        assert {n: made.held(n) for n in owned(store)} == owned(store)
        assert made.verify() == [] and made.digest == store.digest
        assert made.trunk_path.read_bytes() == store.trunk_path.read_bytes()
        assert "of them on the disk" in node.stderr() and "left out" not in node.stderr()
    spec = store.manifest.layer(0)
    blocks = sum(map(len, owned(store).values())) * spec.stride
    files = sum(file.size for file in store.manifest.files.values())
    manifest = (store.path / "manifest.json").stat().st_size
    small_files = 4096 * (len(store.manifest.files) + 5)
    assert disk.sizes(tmp_path / "empty")[1] <= 1.05 * (blocks + files) + manifest + small_files


def test_it_starts_again_by_itself(store: Store, peers: list[NodeProcess], tmp_path: Path) -> None:
    """What was fetched is a store: with or without peers nothing is asked for again."""
    with joining(tmp_path / "c", urls(peers)) as node:
        node.wait_ready()
    away = "http://127.0.0.1:9"
    with joining(tmp_path / "c", away) as node:
        assert "ready" in node.wait_ready().ready_line and "fetch" not in node.stderr()
    (line,) = [ends(tmp_path / "c", "--roster", "c")]
    assert "is not in this store, which holds a part of the blocks" in line and "--peers" in line


def test_without_a_trunk(store: Store, peers: list[NodeProcess], tmp_path: Path) -> None:
    """--no-trunk leaves it out, a driver finds it elsewhere, and a later start fetches it."""
    with joining(tmp_path / "c", urls(peers), "--no-trunk") as node:
        node.wait_ready()
        assert not (tmp_path / "c" / "trunk.safetensors").exists()
        assert node.get("/status")["trunk"] is False
        with pytest.raises(HTTPError, match="404"):
            node.get("/file/trunk.safetensors")
        sources = [node.url, peers[0].url]
        copy = asyncio.run(fetch_store(sources, tmp_path / "driver", None, store.digest))
        assert Store.open(copy, blocks=False).verify() == []
    with joining(tmp_path / "c", urls(peers)) as node:
        node.wait_ready()
        assert node.get("/status")["trunk"] is True


def test_what_a_kill_left_is_not_fetched_again(
    store: Store, peers: list[NodeProcess], tmp_path: Path
) -> None:
    """Only blocks without a mark are fetched, and those not known to be on the disk are hashed."""
    wanted = [(layer, expert) for layer, ids in owned(store).items() for expert in ids]
    shutil.copytree(store.path, tmp_path / "c", ignore=shutil.ignore_patterns("bin"))
    made = Store.open(tmp_path / "c", blocks=False)
    made.make_room()
    for at in wanted[:-1]:
        made.keep(*at, store.read_block(*at))
    layer, expert = wanted[0]
    flip(made.path / made.manifest.layer(layer).file, made.manifest.layer(layer).offset(expert))
    with joining(made.path, urls(peers)) as node:
        node.wait_ready()
        assert "fetched 2 blocks" in node.stderr()
    assert made.verify() == []


def test_a_kill_in_the_middle(store: Store, peers: list[NodeProcess], tmp_path: Path) -> None:
    """After kill -9 only what had not been verified is fetched."""

    def held() -> int:
        if not (tmp_path / "c").exists():
            return 0
        made = Store.open(tmp_path / "c")
        return sum(len(made.held(layer)) for layer in owned(store))

    pin = ["--manifest-sha256", store.digest, "--no-trunk"]
    with FaultProxy({"slow": (HOST, peers[0].port)}) as proxy:
        proxy.always("slow", Throttle(60_000))
        with joining(tmp_path / "c", proxy.urls()["slow"], *pin) as node:
            deadline = monotonic() + 60
            while not held():
                assert monotonic() < deadline, node.story("fetched nothing")
            node.kill()
    count, kept = sum(map(len, owned(store).values())), held()
    assert 0 < kept < count
    with joining(tmp_path / "c", urls(peers), *pin) as node:
        node.wait_ready()
        assert f"fetched {count - kept} blocks" in node.stderr()


def test_it_answers_while_it_fetches(tmp_path: Path) -> None:
    """Before anything is there /health says fetching, and other requests are to come again."""
    released = Event()
    with serving(lambda sock: released.wait(60)) as silent:
        node = NodeProcess(_on(port := unused_port(), tmp_path / "c", silent))
        try:
            _until_connected(port)
            for path, said in (("/health", "fetching"), ("/manifest", "fetching its manifest")):
                with pytest.raises(HTTPError) as refused:
                    urlopen(f"http://127.0.0.1:{port}{path}", timeout=10)
                assert refused.value.code == 503 and said in refused.value.read().decode()
                refused.value.close()
            node.send(signal.SIGTERM)
            assert node.wait() == 0 and "stopped while fetching" in node.stderr()
        finally:
            released.set()
            node.close()


def _on(port: int, store: Path, peer: int, me: str = "c") -> list[str]:
    """The command of a node on that port, whose only peer is on another one."""
    command = node_command(ROSTER, me, store, "--peers", f"http://127.0.0.1:{peer}")
    command[command.index("--port") + 1] = str(port)
    return command


def test_two_from_each_other(store: Store, tmp_path: Path) -> None:
    """Two new nodes that name each other and nobody else end with a sentence, not in a wait."""
    first, second = unused_port(), unused_port()
    commands = [
        _on(first, tmp_path / "a", second, "a"),
        _on(second, tmp_path / "b", first, "b"),
    ]
    nodes = [NodeProcess(command) for command in commands]
    try:
        codes = [node.wait(60) for node in nodes]
        assert codes == [4, 4], [node.stderr() for node in nodes]
        said = " ".join(node.stderr() for node in nodes)
        assert "fetching its manifest" in said or "refused the connection" in said
    finally:
        for node in nodes:
            node.close()


def test_from_a_peer_that_has_a_part(
    store: Store, peers: list[NodeProcess], tmp_path: Path
) -> None:
    """A node with its own blocks alone gives them on, and the missing block is named."""
    with joining(tmp_path / "c", urls(peers)) as node:
        node.wait_ready()
        line = ends(tmp_path / "d", "--me", "b", "--peers", node.url, "--manifest-sha256",
                    store.digest)  # fmt: skip
        assert "cannot be had from any peer" in line and f"({node.url}: it has no such" in line
        made = Store.open(tmp_path / "d")
        assert made.digest == store.digest


def test_the_manifest_is_pinned(store: Store, peers: list[NodeProcess], tmp_path: Path) -> None:
    """One peer alone is not believed, and a digest that is not the peers' names them."""
    line = ends(tmp_path / "c", "--peers", peers[0].url)
    assert "one peer alone is not believed" in line and store.digest in line
    line = ends(tmp_path / "c", "--peers", urls(peers), "--manifest-sha256", "0f" * 32)
    assert "is not the manifest 0f0f0f0f0f0f" in line and peers[0].url in line
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk(store: Store, peers: list[NodeProcess], tmp_path: Path) -> None:
    """A disk too small for the blocks is one sentence, and what is there stays."""
    with small_disk(tmp_path / "disk", 220 << 10) as small:
        line = ends(small / "c", "--peers", urls(peers))
        assert line.startswith(f"error: {small}") and "is free; free some space" in line


def _until_connected(port: int) -> None:
    """Wait until something listens there."""
    deadline = monotonic() + 60
    while monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            continue
    raise AssertionError("nothing listens")

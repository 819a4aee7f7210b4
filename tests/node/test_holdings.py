"""Blocks that a node takes over while it serves."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest

from expert_network.backend import detect
from expert_network.experts.partition import load_partition
from expert_network.store.reader import Store
from expert_node.compute import Computer
from expert_node.holdings import Holdings
from expert_node.metrics import Counters
from expert_protocol.frames import Dispatch, ErrorCode, ErrorReply, Reply, ReplyMode
from expert_roster.rendezvous import partition
from expert_roster.roster import Roster
from tests.support.links import dispatch_of, linked
from tests.support.nodes import NodeProcess, node_process, node_processes
from tests.support.servers import unused_port

OWN = np.array([0, 1, 2])
ROOM = 1 << 40


@pytest.fixture
def without_blocks(store: Store, tmp_path: Path) -> Store:
    """The same model with no block on the disk."""
    shutil.copytree(store.path, tmp_path / "bare", ignore=lambda *_: {"bin"})
    return Store.open(tmp_path / "bare", blocks=False)


@pytest.fixture
def computer(store: Store) -> Computer:
    """Holds experts 0, 1, 2 of layer 0."""
    held = load_partition(store, {0: OWN}, detect())
    return Computer("a", held, store.manifest.shape, Counters())


def asked(store: Store, *experts: int, mode: ReplyMode = ReplyMode.EXACT) -> Dispatch:
    rows = np.random.default_rng(1).normal(size=(1, store.manifest.layer(0).hidden))
    made = dispatch_of(0, rows.astype(np.float32), [experts], mode)
    return replace(made, adopt=True)


def expected(store: Store, dispatch: Dispatch) -> Reply:
    whole = load_partition(store, {0: np.arange(8)}, detect())
    answer = Computer("b", whole, store.manifest.shape, Counters()).answer(dispatch)
    assert isinstance(answer, Reply)
    return answer


def adopting(holdings: Holdings, computer: Computer, dispatch: Dispatch, *peers: str) -> object:
    return computer.answer(dispatch, lambda layer, ids: holdings.adopt(layer, ids, peers))


def test_from_the_disk(store: Store, computer: Computer) -> None:
    """A block that is asked to be adopted is read from the disk, and computed as by its owner."""
    holdings = Holdings("a", store, computer, None, lambda: ROOM)
    dispatch = asked(store, 5, 1, 7)
    answer = adopting(holdings, computer, dispatch)
    assert isinstance(answer, Reply)
    assert np.array_equal(answer.data, expected(store, dispatch).data)
    assert computer.blocks.owned(0).tolist() == [0, 1, 2, 5, 7]
    # From now on it is held like any other.
    assert isinstance(computer.answer(replace(dispatch, adopt=False)), Reply)


def test_only_when_it_is_asked_for(store: Store, computer: Computer) -> None:
    """Without ADOPT a block that is not held is refused, and so is one that no model has."""
    holdings = Holdings("a", store, computer, None, lambda: ROOM)
    refused = adopting(holdings, computer, replace(asked(store, 5), adopt=False))
    assert isinstance(refused, ErrorReply) and refused.code is ErrorCode.NOT_OWNED
    refused = adopting(holdings, computer, asked(store, 8))
    assert isinstance(refused, ErrorReply) and refused.code is ErrorCode.NOT_OWNED
    assert computer.blocks.owned(0).tolist() == OWN.tolist()


def test_from_a_peer(
    store: Store, without_blocks: Store, computer: Computer, node: NodeProcess
) -> None:
    """What the disk does not have comes from the first peer that gives it."""
    holdings = Holdings("a", without_blocks, computer, None, lambda: ROOM)
    dispatch = asked(store, 5, 6)
    nobody = f"http://127.0.0.1:{unused_port()}"
    answer = adopting(holdings, computer, dispatch, nobody, node.url)
    assert isinstance(answer, Reply)
    assert np.array_equal(answer.data, expected(store, dispatch).data)


def test_a_peer_that_gives_something_else(
    store: Store, without_blocks: Store, computer: Computer, tmp_path: Path
) -> None:
    """A block that is not the manifest's is never computed with, and the sentence names it."""
    spoiled, spec = tmp_path / "spoiled", store.manifest.layer(0)
    shutil.copytree(store.path, spoiled)
    held = partition(Roster.parse("a,b"), "b", store.manifest.shape)[0].tolist()
    lacking = next(expert for expert in range(8) if expert not in (*held, *OWN.tolist()))
    with node_process("a,b", "b", spoiled) as peer, (spoiled / spec.file).open("r+b") as file:
        file.seek(spec.offset(lacking))
        file.write(bytes(64))
        file.flush()
        holdings = Holdings("a", without_blocks, computer, None, lambda: ROOM)
        answer = adopting(holdings, computer, asked(store, lacking, 1), peer.url)
    assert isinstance(answer, ErrorReply) and answer.code is ErrorCode.NO_BLOCK
    assert f"(0, {lacking})" in answer.message
    assert computer.blocks.owned(0).tolist() == OWN.tolist()


def test_without_memory(store: Store, computer: Computer) -> None:
    """A block for which there is no memory is refused, and what is held goes on."""
    holdings = Holdings("a", store, computer, None, lambda: 0)
    answer = adopting(holdings, computer, asked(store, 5))
    assert isinstance(answer, ErrorReply) and answer.code is ErrorCode.NO_BLOCK
    assert "memory" in answer.message
    assert isinstance(adopting(holdings, computer, asked(store, 1)), Reply)


def test_a_fault_of_adopting_is_a_refusal(store: Store, computer: Computer) -> None:
    """Whatever goes wrong while a block is taken, the link goes on."""

    def broken(layer: int, experts: object) -> str | None:
        raise RuntimeError("no thread")

    answer = computer.answer(asked(store, 5), broken)
    assert isinstance(answer, ErrorReply) and answer.code is ErrorCode.INTERNAL
    assert isinstance(computer.answer(asked(store, 1), broken), Reply)


@pytest.fixture(scope="module")
def nodes(store: Store) -> Iterator[list[NodeProcess]]:
    with node_processes("a,b", store.path) as running:
        yield running


def test_over_a_link_that_knows_the_layer(store: Store, nodes: list[NodeProcess]) -> None:
    """Native code that has answered a layer before meets a block that another link brought."""
    mine = partition(Roster.parse("a,b"), "a", store.manifest.shape)[0].tolist()
    others = [expert for expert in range(8) if expert not in mine]
    first = replace(asked(store, *mine, mode=ReplyMode.SUM), adopt=True)
    both = replace(asked(store, others[0], mine[0], mode=ReplyMode.SUM), adopt=True)
    with linked(nodes[0].url, store.manifest) as old, linked(nodes[0].url, store.manifest) as new:
        for _ in range(3):
            assert isinstance(old.ask(first), Reply)
        answer = new.ask(both)
        assert isinstance(answer, Reply)
        kept = answer.data.copy()
        for _ in range(3):
            again = old.ask(both)
            assert isinstance(again, Reply) and np.array_equal(again.data, kept)
        whole = expected(store, replace(both, precise=False)).data
        assert np.allclose(kept, whole, rtol=1e-2, atol=1e-3)


def put(url: str, layer: int, expert: int, data: bytes, sha256: str | None = None) -> int:
    """Give a node a block; the status of its answer."""
    digest = sha256 or hashlib.sha256(data).hexdigest()
    request = Request(f"{url}/block/{layer}/{expert}?sha256={digest}", data, method="PUT")
    try:
        with urlopen(request, timeout=20) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code


def test_a_block_may_be_given(store: Store, node: NodeProcess) -> None:
    """A driver gives what no node has; other bytes than the manifest's are never taken."""
    mine = set(node.get("/status")["partition"]["layers"]["0"])
    other = next(expert for expert in range(8) if expert not in mine)
    block = bytes(store.read_block(0, other))
    with node_process("a,b", "a", store.path) as taker:
        assert put(taker.url, 0, other, block[:-1] + b"x") == 409
        wrong = put(taker.url, 0, other, block[:-1] + b"x", hashlib.sha256(block).hexdigest())
        assert wrong == 409
        assert put(taker.url, 0, other, block + b"x", hashlib.sha256(block).hexdigest()) == 413
        assert put(taker.url, 0, 99, block) == 404
        assert set(taker.get("/status")["partition"]["layers"]["0"]) == mine
        assert put(taker.url, 0, other, block) == 204
        assert put(taker.url, 0, other, block) == 204
        assert set(taker.get("/status")["partition"]["layers"]["0"]) == mine | {other}

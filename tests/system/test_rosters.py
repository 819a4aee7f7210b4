"""`expert-net roster set` on a network of real nodes, and what happens when it does not go well."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from expert_driver import rosters
from expert_driver.cli import main
from expert_driver.config import Sampling
from expert_driver.opening import Session
from expert_network.errors import ExpertNetworkError
from expert_network.net.rosters import Change
from expert_roster.roster import Roster
from tests.driver.programs import DEMO_STORE
from tests.support.nodes import NodeProcess, node_process, node_processes
from tests.system.sessions import session
from tests.system.test_join_leave import joiner


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[NodeProcess]]:
    """a and b of a,b, and c, which was started with a roster that names it too."""
    with ExitStack() as stack:
        pair = stack.enter_context(node_processes("a,b", DEMO_STORE))
        yield [*pair, stack.enter_context(node_process("a,b,c", "c", DEMO_STORE))]


def urls(nodes: list[NodeProcess]) -> str:
    return ",".join(node.url for node in nodes)


def orders(nodes: list[NodeProcess]) -> list[tuple[int, int]]:
    """Each node's epoch, and how many nodes its roster has."""
    said: list[Any] = [node.get("/roster")["roster"] for node in nodes]
    return [(roster["epoch"], len(roster["nodes"])) for roster in said]


def words(opening: Session) -> list[int]:
    assert opening.text is not None
    ids = opening.text.encode_chat([{"role": "user", "content": "Tell me about the network."}])
    return list(opening.engine.generate(ids, opening.engine.context(), Sampling(max_tokens=12)))


def epoch(nodes: list[NodeProcess]) -> int:
    """The latest epoch that any of the nodes serves."""
    return max(epoch for epoch, _ in orders(nodes))


def test_set(nodes: list[NodeProcess], capsys: pytest.CaptureFixture[str]) -> None:
    """What would move is shown, then moved; drivers that were open meanwhile answer on."""
    with session(DEMO_STORE, text=True) as alone:
        expected = words(alone)
    with ExitStack() as stack:
        opening = stack.enter_context(session(DEMO_STORE, nodes[:2], exact=True, text=True))
        in_sums = stack.enter_context(session(DEMO_STORE, nodes[:2], text=True, wire="f32"))
        assert words(opening) == expected and words(in_sums)
        change = ["roster", "set", "a,b,c=2", "--nodes", urls(nodes)]
        assert main([*change, "--dry-run"]) == 0
        said = capsys.readouterr()
        assert "128 of 256 copies of blocks move, 7.1 MB; about" in said.out
        assert "a, b: a,b (epoch 0); c: a,b,c (epoch 0)" in said.err
        assert orders(nodes) == [(0, 2), (0, 2), (0, 3)]
        assert main(change) == 0
        assert "epoch 1 has begun: a=1,b=1,c=2" in capsys.readouterr().out
        assert orders(nodes) == [(1, 3)] * 3
        for _ in range(2):
            assert words(opening) == expected and words(in_sums)
        for each in (opening, in_sums):
            network = each.network
            assert network is not None and network.agreement.roster.epoch == 1
            assert network.figures.failovers == 0
            assert [figures.name for figures in network.figures.nodes] == ["a", "b", "c"]
            assert network.figures.nodes[2].pairs > 0
        # One address is enough from now on, for a new driver too.
        assert main(["roster", "set", "a,b", "--nodes", nodes[0].url]) == 0
        assert orders(nodes) == [(2, 2)] * 3
        with session(DEMO_STORE, nodes[:1], exact=True, text=True) as other:
            assert words(other) == expected
        assert words(opening) == expected and words(in_sums)
    capsys.readouterr()
    assert main(["roster", "set", "a,b", "--nodes", nodes[0].url]) == 0
    assert "has this roster already, with epoch 2" in capsys.readouterr().out
    assert main(["roster", "set", "a,b,x", "--nodes", nodes[0].url]) == 3
    assert "no node x answers" in capsys.readouterr().err


async def set_roster(nodes: list[NodeProcess], text: str) -> str:
    """Set a roster with the next epoch; "" or why that did not go."""
    try:
        network = await rosters.look([node.url for node in nodes], None)
        wanted = replace(Roster.parse(text), epoch=network.next_epoch)
        plan = await rosters.plan(network, wanted, None)
        await rosters.carry_out(plan, None, lambda done, total, what: None)
    except ExpertNetworkError as error:
        return str(error)
    return ""


def test_two_at_once(nodes: list[NodeProcess]) -> None:
    """Of two rosters that are set at once one goes first, everywhere, and the other one is told."""

    async def both() -> tuple[str, str]:
        return await asyncio.gather(set_roster(nodes, "a,b,c=2"), set_roster(nodes, "a=3,b,c"))

    said = asyncio.run(both())
    # Both may go, one after the other; none is half done.
    assert "" in said, said
    told = [sentence for sentence in said if sentence]
    assert all("another roster" in s or "already" in s or "not proposed" in s for s in told), said
    assert len({node.get("/roster")["roster"]["digest"] for node in nodes}) == 1
    assert [node.get("/roster")["pending"] for node in nodes] == [None] * 3


def begin(nodes: list[NodeProcess], text: str, committed: str) -> Roster:
    """Have nodes gain what a proposer wants that is killed once it has told `committed` to flip."""
    roster = replace(Roster.parse(text), epoch=epoch(nodes) + 1)
    addresses = dict(zip("abc", (node.url for node in nodes), strict=True))

    async def killed() -> None:
        wire = {**roster.to_wire(), "digest": roster.digest}
        model = nodes[0].get("/roster")["model_digest"]
        async with Change(model, wire, "ann@attic (process 7)", addresses, None) as change:
            await change.gain(lambda seats: None, 30.0)
            if committed:
                only = {committed: change._clients[committed]}
                await change._everywhere("/roster/commit", change._order_only(), only)
            change._proposed = False  # it does not come to cancel

    asyncio.run(killed())
    return roster


def test_a_proposer_that_is_gone(
    nodes: list[NodeProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    """What a killed proposer left behind is named, kept from others, and given up with --force."""
    before, now = orders(nodes), epoch(nodes)
    begin(nodes, "a,b=4,c=2", committed="")
    change = ["roster", "set", "a,b,c", "--nodes", urls(nodes)]
    assert main(change) == 4
    said = capsys.readouterr().err
    assert f"ann@attic (process 7) is proposing epoch {now + 1} to node a." in said
    assert "--force" in said and orders(nodes) == before
    assert main([*change, "--force"]) == 0
    assert orders(nodes) == [(now + 2, 3)] * 3


def test_a_commit_that_reached_one_node(nodes: list[NodeProcess]) -> None:
    """A proposer that dies while nodes flip leaves none behind: the next one brings all in line."""
    now = epoch(nodes)
    begin(nodes, "a,b=2,c=3", committed="a")
    assert [epoch for epoch, _ in orders(nodes)] == [now + 1, now, now]
    with session(DEMO_STORE, text=True) as alone:
        expected = words(alone)
    with session(DEMO_STORE, nodes, exact=True, text=True) as opening:
        assert words(opening) == expected  # the latest roster counts
    assert asyncio.run(set_roster(nodes, "a,b")) == ""
    assert orders(nodes) == [(now + 2, 2)] * 3


def test_a_node_that_comes_back(nodes: list[NodeProcess], tmp_path: Path) -> None:
    """Two nodes join at once; one that is killed takes its place again, from its own disk."""
    pair, now = nodes[:2], epoch(nodes)
    with ExitStack() as stack:

        def started(name: str) -> NodeProcess:
            node = joiner(pair, name, tmp_path / name)
            stack.callback(node.close)
            return node

        d, e = started("d"), started("e")
        for node in (d, e):
            node.wait_ready()
        assert orders([*pair, d, e]) == [(now + 2, 4)] * 4
        d.kill()
        again = started("d").wait_ready()
        assert orders([*pair, again, e]) == [(now + 2, 4)] * 4
        assert again.get("/roster")["fetched"] == 0
        assert again.get("/status")["partition"]["blocks"] > 0

"""expert_network.net.rosters: what nodes say is checked, and what becomes of a change."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from expert_network.errors import NetworkMismatch, NodeRefused, NodeUnreachable, NotANode
from expert_network.net import rosters
from expert_network.net.rosters import Change, Seat, ask_all

OLD = {"nodes": [["a", 1.0]], "replicas": 1, "epoch": 3, "digest": "0a" * 32}
NEW = {"nodes": [["a", 1.0], ["b", 1.0]], "replicas": 1, "epoch": 4, "digest": "0b" * 32}


def said(**changes: Any) -> dict[str, Any]:
    seat = {
        "node": "a",
        "model_digest": "ab" * 32,
        "roster": OLD,
        "addresses": {},
        "fetched": 0,
        "pending": None,
    }
    return {**seat, **changes}


def pending(**changes: Any) -> dict[str, Any]:
    return {
        **{"epoch": 4, "digest": NEW["digest"], "proposer": "ann", "done": 1, "total": 2},
        **{"ready": False, "error": None},
        **changes,
    }


@asynccontextmanager
async def node(*answers: Any) -> AsyncIterator[tuple[str, list[tuple[str, Any]]]]:
    """A node that says these one after the other, the last one again and again; what it is asked.

    An answer is a seat, or a status and a sentence.
    """
    asked: list[tuple[str, Any]] = []
    left = list(answers)

    async def answer(request: web.Request) -> web.Response:
        body = await request.read()
        asked.append((request.path, json.loads(body) if body else None))
        if request.path == "/roster/cancel":
            return web.json_response(said())
        now = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(now, tuple):
            return web.json_response({"error": now[1]}, status=now[0])
        return web.json_response(now)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", asked
    finally:
        await runner.cleanup()


def change(**addresses: str) -> Change:
    return Change("ab" * 32, NEW, "ann", addresses, None)


def test_a_seat_is_read() -> None:
    """What a node says becomes a Seat."""
    seat = Seat.read("http://a", said(pending=pending(), addresses={"a": "http://a"}))
    assert seat.order == (3, OLD["digest"]) and seat.names == ("a",)
    assert seat.pending is not None and seat.pending.order == (4, NEW["digest"])


@pytest.mark.parametrize(
    "message",
    [
        None, [], {}, said(node=3), said(roster=None), said(roster={**OLD, "epoch": -1}),
        said(roster={**OLD, "nodes": [[1, 1]]}), said(roster={**OLD, "nodes": "a"}),
        said(roster={**OLD, "nodes": [["a"]]}), said(roster={**OLD, "nodes": [[]]}),
        said(addresses=[]), said(addresses={"a": "\n"}), said(fetched=True), said(pending=7),
        said(pending=pending(done="1")), said(pending=pending(proposer="x" * 300)),
    ],
)  # fmt: skip
def test_what_is_no_seat(message: Any) -> None:
    """Anything else names the address that sent it."""
    with pytest.raises(NotANode, match="http://a answers /roster with what is not understood"):
        Seat.read("http://a", message)


async def test_ask_all() -> None:
    """Each address has its answer, or why there is none."""
    async with node(said()) as (url, _):
        answers = await ask_all([url, "http://127.0.0.1:1"], None)
    assert isinstance(answers[url], Seat)
    assert isinstance(answers["http://127.0.0.1:1"], NodeUnreachable)


async def test_a_change() -> None:
    """A node is asked until it is ready, then told to commit, and nothing is cancelled."""
    answers = [
        said(pending=pending()), said(pending=pending(ready=True, done=2)), said(roster=NEW),
    ]  # fmt: skip
    heard: list[int] = []
    async with node(*answers) as (url, asked), change(a=url) as changing:
        await changing.gain(lambda seats: heard.append(seats[0].pending.done), 10.0)  # type: ignore[union-attr]
        await changing.commit()
    assert heard == [1, 2]
    assert [path for path, _ in asked] == ["/roster/propose", "/roster/propose", "/roster/commit"]
    assert asked[0][1]["roster"] == NEW
    assert asked[2][1] == {"epoch": 4, "digest": NEW["digest"]}


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        ((409, "bob is setting another roster"), NodeRefused, "bob is setting another roster"),
        (said(pending=pending(digest="0c" * 32)), NetworkMismatch, "ann is setting another roster"),
        (said(pending=pending(error="no room")), NodeRefused, "cannot take its part .*: no room"),
        (said(node="z"), NodeRefused, "is node z, where node a was expected"),
        (said(pending=pending()), NetworkMismatch, "a, b did not get ready within 0 s"),
    ],
)
async def test_a_change_that_does_not_go(answer: Any, kind: type[Exception], words: str) -> None:
    """Whatever keeps a node from it is raised, and the roster is cancelled everywhere."""
    async with (
        node(answer) as (url, asked),
        node(said(node="b", pending=pending())) as (other, also),
    ):
        with pytest.raises(kind, match=words):
            async with change(a=url, b=other) as changing:
                await changing.gain(lambda seats: None, 0.0)
        assert asked[-1][0] == also[-1][0] == "/roster/cancel"


async def test_a_commit_that_one_node_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that does not flip is named, once it has been asked again for a while."""
    monkeypatch.setattr(rosters, "COMMIT_S", 0.1)
    monkeypatch.setattr(rosters, "AGAIN_S", 0.01)
    async with node(said(roster=NEW)) as (url, _), node((503, "it drains")) as (other, asked):
        with pytest.raises(NetworkMismatch, match=r"epoch 4 began without b \(.*it drains"):
            async with change(a=url, b=other) as changing:
                await changing.commit()
        assert len(asked) > 1 and all(path == "/roster/commit" for path, _ in asked)

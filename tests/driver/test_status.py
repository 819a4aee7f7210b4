"""Reading what nodes say of themselves, and what is wrong with a network of them."""

from __future__ import annotations

from typing import Any

import pytest

from expert_driver.status import HEADERS, NodeStatus, as_json, problems, row, shared
from expert_protocol.header import VERSION
from expert_roster.roster import Roster

OK = {"status": "ok"}


def said(name: Any, blocks: Any, roster: str = "a,b", **changes: Any) -> Any:
    """The JSON of a node's /status, in a model of one layer of four experts."""
    whole = Roster.parse(roster)
    return {
        "name": name,
        "software": "0.1.0",
        "protocol": VERSION,
        "model_digest": "a" * 64,
        "roster": whole.to_wire() | {"digest": whole.digest},
        "numerics": "mlx-cpu/x",
        "partition": {"blocks": 2, "bytes": 2000, "total_blocks": 4, "layers": blocks},
        "uptime_s": 75.0,
        "links": 1,
        "rss_bytes": 10**6,
    } | changes


def node(
    name: str, blocks: dict[str, list[int]], roster: str = "a,b", **changes: Any
) -> NodeStatus:
    return NodeStatus.read(f"http://{name}", OK, said(name, blocks, roster, **changes))


A, B = {"0": [0, 1]}, {"0": [2, 3]}


def test_a_sound_network_has_no_problem() -> None:
    """Nodes that agree and together hold every block are fine."""
    assert problems([node("a", A), node("b", B)]) == []


def test_a_row() -> None:
    """A row names the node, its part, and how it fares."""
    cells = dict(zip(HEADERS, row(node("a", A)), strict=True))
    assert cells["node"] == "a" and cells["blocks"] == "2/4" and cells["bytes"] == "2.0 KB"
    assert cells["up"] == "1 min 15 s" and "model" not in cells
    assert shared([node("a", A), node("b", B)])[0] == f"model     {'a' * 12}"


def test_an_unreachable_node_is_a_row() -> None:
    """A node that does not answer keeps its row, and is a problem."""
    absent = NodeStatus("http://b", "node http://b refused the connection")
    assert row(absent)[:3] == ("?", "b", "no status")
    assert problems([node("a", A), absent]) == [
        "node http://b refused the connection.",
        "2 of 4 blocks have no owner here; b of the roster did not answer.",
    ]


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([node("a", A), node("a", B)], "are all node a"),
        ([node("a", A), node("b", B, model_digest="b" * 64)], "different models (a: aaaaaaaaaaaa"),
        ([node("a", A), node("b", B, roster="a,b=2")], "different rosters (a: a,b; b: a=1,b=2)"),
        (
            [node("a", A), node("b", B, protocol=VERSION + 1)],
            f"different protocol versions (a: {VERSION}; b: {VERSION + 1})",
        ),
    ],
)
def test_differences_are_sentences(nodes: list[NodeStatus], words: str) -> None:
    """Each difference between nodes is one sentence with the values."""
    found = problems(nodes)
    assert any(words in sentence for sentence in found), found


def test_a_draining_node_is_a_problem() -> None:
    """A node that is about to stop is not counted as sound."""
    draining = NodeStatus.read("http://a", {"status": "draining"}, said("a", A))
    assert problems([draining, node("b", B)]) == ["node a is draining."]


@pytest.mark.parametrize(
    "status",
    [
        None,
        [],
        {},
        said(7, A),
        said("\x1b[2J", A),
        said("a", A, links="many"),
        said("a", A, model_digest="../../elsewhere"),
        said("a", A, model_digest=""),
        said("a", A, protocol=float("inf")),
        said("a", A, uptime_s=float("nan")),
        said("a", A, rss_bytes=10**30),
        said("a", {"0": [float("inf")]}),
        said("a", {"0": ["x"]}),
        said("a", A, roster="a,b") | {"roster": {"nodes": [["", 1]]}},
        said("a", A) | {"partition": {"layers": 5}},
    ],
)
def test_what_is_no_status_is_an_error_row(status: object) -> None:
    """Whatever a peer sends in a status's place becomes a row with an error."""
    error = NodeStatus.read("http://a", OK, status).error
    assert error is not None and "not understood" in error


def test_json_has_the_problems_and_plain_values() -> None:
    """--json can be written as JSON and says what is wrong."""
    import json

    found = json.loads(json.dumps(as_json([node("a", A), NodeStatus("http://b", "it hangs")])))
    assert found["nodes"][0]["blocks"] == 2
    assert found["nodes"][0]["roster"]["digest"] == Roster.parse("a,b").digest
    assert len(found["problems"]) == 2

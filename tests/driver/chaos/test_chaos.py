"""`expert-net chaos`: what it finds out about a network, and what it says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from expert_driver.chaos.faults import Fired, Planned, Point
from expert_driver.chaos.rounds import FAILED, OTHER, SAME, UNREACHED, Report, Settings, _Rounds
from expert_driver.cli import main
from expert_network.errors import ExpertNetworkError, NetworkMismatch, NodeClosed
from tests.driver.programs import DEMO_STORE
from tests.support.nodes import node_processes

SETTINGS = Settings(("cut",), 1, 4, 7)
RIGHT = [1, 2, 3, 4]

Reply = list[int] | ExpertNetworkError


@dataclass
class FakeEngine:
    """Gives these replies, one after the other."""

    replies: Sequence[Reply]
    vocabulary: int = 100

    def context(self) -> None:
        return None

    def generate(self, prompt: Any, context: Any, sampling: Any) -> Iterator[int]:
        reply, *self.replies = self.replies
        if isinstance(reply, ExpertNetworkError):
            raise reply
        return iter(reply)


class FakeNetwork:
    """Has one node, which is linked."""

    def ready(self) -> Any:
        return SimpleNamespace(nodes=["b"])


@dataclass
class FakeProxy:
    """Says that what is planned struck at once, if it strikes at all."""

    strikes: bool = True
    fired: list[Fired] = field(default_factory=list)

    def plan(self, *faults: Planned) -> None:
        if self.strikes:
            self.fired += [Fired(faults[0], "http://x", Point(3, 5), 0.0)]

    def restart(self) -> None: ...
    def heal(self) -> None: ...


def report(*replies: Reply, strikes: bool = True) -> Report:
    session = cast(Any, SimpleNamespace(engine=FakeEngine(replies), network=FakeNetwork()))
    proxy = cast(Any, FakeProxy(strikes))
    rounds = _Rounds(session, proxy, {"http://x": "b"}, [1, 5], SETTINGS)
    return rounds.run(lambda done, total, what: None)


CLOSED = NodeClosed("b", "closed the link", "check that it still runs")


@pytest.mark.parametrize(
    ("reply", "strikes", "result", "failures"),
    [
        (RIGHT, True, SAME, 0),
        ([1, 2, 3, 5], True, OTHER, 1),
        (CLOSED, True, FAILED, 1),
        (RIGHT, False, UNREACHED, 0),
        (CLOSED, False, FAILED, 1),
    ],
)
def test_what_became_of_a_reply(reply: Reply, strikes: bool, result: str, failures: int) -> None:
    """Tokens are compared with those without a fault; errors and faults that had no turn show."""
    found = report(RIGHT, RIGHT, reply, strikes=strikes)
    (one,) = found.rounds
    assert (one.fault, one.node, one.result) == ("cut", "b", result)
    assert (one.token, one.layer) == ((3, 5) if strikes else (None, None))
    assert one.error == (str(CLOSED) if reply is CLOSED else None)
    assert found.failures == failures


def test_nothing_is_shown_by_a_reply_that_changes_by_itself() -> None:
    """If the reply without faults differs from itself, that is the error."""
    with pytest.raises(NetworkMismatch, match="two different replies"):
        report(RIGHT, [9, 9, 9, 9])


def test_over_real_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    """Faults strike where they were drawn, and every reply is right all the same."""
    with node_processes("a,b,c", DEMO_STORE, "--replicas", "2") as nodes:
        urls = ",".join(node.url for node in nodes)
        words = ["chaos", str(DEMO_STORE), "--nodes", urls, "--tokens", "8", "--seed", "5"]
        assert main([*words, "--faults", "delay", "--rounds", "1"]) == 0
        out = capsys.readouterr().out
        assert out.count("same tokens") == 1
        assert "1 of 1 replies of 8 tokens were right" in out and out.endswith("seed 5\n")
        assert main([*words, "--faults", "cut,half-open", "--rounds", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["failures"] == 0 and {one["result"] for one in found["rounds"]} == {SAME}
    assert {one["fault"] for one in found["rounds"]} == {"cut", "half-open"}


def test_bad_words(capsys: pytest.CaptureFixture[str]) -> None:
    """A fault that there is not is a wrong command line."""
    assert main(["chaos", "--nodes", "a", "--faults", "cut,flood"]) == 2
    assert "'flood' is no fault; there are cut, delay, drip" in capsys.readouterr().err

"""expert_driver.dispatch.epochs: what a driver makes of what nodes say of their rosters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from expert_driver.dispatch import epochs
from expert_driver.dispatch.epochs import Epochs, News, asking, regreeted
from expert_network.net.rosters import Seat
from expert_roster.roster import Roster
from tests.driver.dispatch.test_agreement import node


def seat(name: str, text: str, epoch: int, **addresses: str) -> Seat:
    roster = replace(Roster.parse(text), epoch=epoch)
    wire = {**roster.to_wire(), "digest": roster.digest}
    return Seat(f"http://{name}", name, "ab" * 32, wire, addresses, None, 0)


def epochs_of(*seats: Seat) -> Epochs:
    def ask(urls: Iterable[str]) -> Sequence[Seat]:
        return [seat for seat in seats if seat.url in urls]

    return Epochs(ask)


def links(*named: int) -> Any:
    return [SimpleNamespace(connection=SimpleNamespace(epoch=epoch)) for epoch in named]


def test_a_later_epoch_is_noticed() -> None:
    """One link that has named a later epoch is enough."""
    told = epochs_of()
    assert told.begun(links(1, 3, 2), 2)
    assert not told.begun(links(1, 2), 2)
    assert not told.begun([], 0)


def test_nodes_are_not_asked_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a question that led to nothing a while passes until the next one."""
    now = 100.0
    monkeypatch.setattr(epochs, "monotonic", lambda: now)
    told = epochs_of()
    assert told.news(["http://a"]) is None
    assert not told.begun(links(3), 2)
    now += epochs.AGAIN_S
    assert told.begun(links(3), 2)


def test_the_latest_roster_is_taken() -> None:
    """The news are the highest epoch's roster, and where its nodes are."""
    told = epochs_of(seat("a", "a,b", 1), seat("b", "a,b,c", 2, c="http://c", a="http://old"))
    roster = replace(Roster.parse("a,b,c"), epoch=2)
    assert told.news(["http://a", "http://b"]) == News(
        roster, {"a": "http://a", "b": "http://b", "c": "http://c"}
    )


def test_a_roster_that_nobody_has_set_is_no_news() -> None:
    """Command lines are what a driver knows already."""
    assert epochs_of(seat("a", "a,b,c", 0)).news(["http://a"]) is None


def test_what_is_no_roster_is_no_news() -> None:
    """A roster that does not have the digest it states is left."""
    wrong = seat("a", "a,b", 1)
    damaged = replace(wrong, roster={**wrong.roster, "replicas": 2})
    assert epochs_of(damaged).news(["http://a"]) is None


def test_a_greeting_of_the_new_roster() -> None:
    """A link's greeting becomes what the node would say now."""
    roster = replace(Roster.parse("a,b,d"), epoch=7)
    greeting = regreeted(node("a"), roster)
    assert greeting.roster == roster
    assert (greeting.welcome.epoch, greeting.welcome.roster_digest) == (7, roster.digest)


def test_nobody_answers() -> None:
    """Nodes that are gone say nothing, and that is no error."""
    assert asking(None)(["http://127.0.0.1:1"]) == []

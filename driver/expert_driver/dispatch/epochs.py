"""A new roster between two tokens: how a driver hears of it, and what it asks then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

from expert_driver.dispatch.agreement import Greeting
from expert_driver.dispatch.links import Link
from expert_network.errors import ExpertNetworkError, RosterError
from expert_network.net.auth import ClusterKey
from expert_network.net.rosters import Seat, ask_all
from expert_roster.roster import Roster

#: For nodes to say what the roster is; and until they are asked again if none has said so.
ASK_S, AGAIN_S = 5.0, 1.0

#: What the nodes at these addresses say of their rosters, those that answer.
Ask = Callable[[Iterable[str]], Sequence[Seat]]


@dataclass(frozen=True)
class News:
    """The latest roster, and where its nodes are, as far as those that were asked know."""

    roster: Roster
    addresses: dict[str, str]


class Epochs:
    """Whether nodes have begun a later epoch than a driver knows. Used by its thread."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._again_at = 0.0

    def begun(self, links: Sequence[Link], epoch: int) -> bool:
        """Whether a reply has named a later epoch than `epoch`, and nodes may be asked of it."""
        return any(link.connection.epoch > epoch for link in links) and (
            monotonic() >= self._again_at
        )

    def news(self, urls: Iterable[str]) -> News | None:
        """What the nodes at `urls` say; None if none answers, or none was ever set."""
        self._again_at = monotonic() + AGAIN_S
        seats = [seat for seat in self._ask(urls) if seat.order[0] > 0]
        if not seats:
            return None
        newest = max(seats, key=lambda seat: seat.order)
        try:
            roster = Roster.from_wire(newest.roster)
        except RosterError:
            return None
        here = {seat.node: seat.url for seat in seats}
        return News(roster, {**newest.addresses, **here})


def asking(key: ClusterKey | None) -> Ask:
    """How nodes are asked, within ASK_S."""

    async def ask(urls: Iterable[str]) -> dict[str, Seat | ExpertNetworkError]:
        async with asyncio.timeout(ASK_S):
            return await ask_all(urls, key)

    def answers(urls: Iterable[str]) -> Sequence[Seat]:
        try:
            found: Iterable[Any] = asyncio.run(ask(urls)).values()
        except TimeoutError:
            return []
        return [answer for answer in found if isinstance(answer, Seat)]

    return answers


def regreeted(greeting: Greeting, roster: Roster) -> Greeting:
    """A node's greeting as it would be now that it serves `roster`."""
    wire, digest = roster.to_wire(), roster.digest
    welcome = replace(greeting.welcome, roster=wire, roster_digest=digest, epoch=roster.epoch)
    return Greeting(greeting.url, welcome)

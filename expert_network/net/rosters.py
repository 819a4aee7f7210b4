"""Setting a roster at all nodes: propose, wait until every gainer is ready, commit.

What the rosters say is nobody's business here: they travel as they are, and are told apart by their
epoch and digest. docs/roster.md has the rules by which nodes answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from expert_network.errors import ExpertNetworkError, NetworkMismatch, NodeRefused
from expert_network.net.answers import not_a_node, printable
from expert_network.net.auth import ClusterKey
from expert_network.net.control import ControlClient

#: A node answers a proposal when it is ready, or after this long, with how far it is.
ANSWER_S = 1.0
#: For a node to answer at all; one that gains is busy.
SILENCE_S = 10.0
#: For all nodes to flip, asked again and again, once all are ready.
COMMIT_S = 15.0
#: Between two tries of that.
AGAIN_S = 0.5
#: Nodes in one answer, and characters of a proposer's name.
MAX_NODES, MAX_NAME = 4096, 256

#: What tells rosters apart, and which of two goes first: (epoch, digest).
Order = tuple[int, str]


@dataclass(frozen=True)
class Pending:
    """A roster that a node has been proposed, and how far it is with gaining blocks, in bytes."""

    order: Order
    proposer: str
    done: int
    total: int
    ready: bool
    error: str | None


@dataclass(frozen=True)
class Seat:
    """What the node at `url` says: the roster it serves, as it travels, and what is pending."""

    url: str
    node: str
    model_digest: str
    roster: Mapping[str, Any]
    addresses: Mapping[str, str]
    pending: Pending | None
    #: Bytes of blocks that it has fetched from others since it started.
    fetched: int

    @property
    def order(self) -> Order:
        return self.roster["epoch"], self.roster["digest"]

    @property
    def names(self) -> tuple[str, ...]:
        """The nodes of its roster."""
        return tuple(name for name, _ in self.roster["nodes"])

    @classmethod
    def read(cls, url: str, message: object) -> Seat:
        """From the JSON of /roster. Raises NotANode for anything else."""
        try:
            found = _table(message)
            roster = _table(found["roster"])
            _check_roster(roster)
            pending = None if found["pending"] is None else _pending(_table(found["pending"]))
            return cls(
                url,
                _text(found["node"]),
                _text(found["model_digest"]),
                roster,
                read_addresses(found["addresses"]),
                pending,
                _count(found["fetched"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise not_a_node(
                url, f"answers /roster with what is not understood ({error})"
            ) from None


def read_addresses(value: object) -> dict[str, str]:
    """Names to URLs, as they travel. Raises ValueError."""
    table = _table(value)
    if len(table) > MAX_NODES:
        raise ValueError("there are too many addresses")
    return {_text(name): _text(url) for name, url in table.items()}


async def ask(client: ControlClient) -> Seat:
    """What a node says of its roster."""
    return Seat.read(client.url, await client.get_json("/roster"))


async def ask_all(
    urls: Iterable[str], key: ClusterKey | None
) -> dict[str, Seat | ExpertNetworkError]:
    """The same of several nodes, or why one says nothing; asked all at once."""

    async def one(url: str) -> Seat | ExpertNetworkError:
        try:
            async with ControlClient(url, key, silence=SILENCE_S) as client:
                return await ask(client)
        except ExpertNetworkError as error:
            return error

    listed = list(urls)
    return dict(zip(listed, await asyncio.gather(*map(one, listed)), strict=True))


class Change:
    """One roster on its way to all of `addresses` (name -> URL), an async context manager.

    model: its digest. roster: as it travels, with its digest. proposer: who, for a person. Left
    before it is committed, the roster is cancelled everywhere.
    """

    def __init__(
        self,
        model: str,
        roster: Mapping[str, Any],
        proposer: str,
        addresses: Mapping[str, str],
        key: ClusterKey | None,
    ) -> None:
        self._proposal = {
            "model": model,
            "roster": dict(roster),
            "proposer": proposer,
            "addresses": dict(addresses),
        }
        self.order: Order = (roster["epoch"], roster["digest"])
        self._clients = {
            name: ControlClient(url, key, silence=SILENCE_S) for name, url in addresses.items()
        }
        self._proposed = self._committed = False

    async def __aenter__(self) -> Change:
        for client in self._clients.values():
            await client.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        try:
            if self._proposed and not self._committed:
                await self._everywhere("/roster/cancel", self._order_only())
        finally:
            for client in self._clients.values():
                await client.__aexit__(None, None, None)

    async def gain(self, told: Callable[[Sequence[Seat]], None], seconds: float) -> None:
        """Propose, and wait until every node has what the roster gives it.

        told: hears about once a second what all nodes say. seconds: how long it may take. Raises
        the first node's failure, NodeRefused if one refuses or cannot gain; NetworkMismatch when
        the time is over, or somebody else's roster goes first.
        """
        deadline = monotonic() + seconds
        while True:
            self._proposed = True
            answers = await self._everywhere("/roster/propose", self._proposal)
            seats = [self._seat(name, answer) for name, answer in answers.items()]
            told(seats)
            if all(seat.order == self.order or _is_ready(seat, self.order) for seat in seats):
                return
            if monotonic() >= deadline:
                slow = ", ".join(s.node for s in seats if not _is_ready(s, self.order))
                raise NetworkMismatch(
                    f"{slow} did not get ready within {seconds:g} s, and the roster stays as it "
                    "was; run the same command again, which goes on with what is there."
                )

    async def commit(self) -> None:
        """Have all nodes flip. Raises NetworkMismatch that names those which did not.

        They follow by themselves once they reach a node that has.
        """
        self._committed = True
        left, deadline = dict(self._clients), monotonic() + COMMIT_S
        while True:
            answers = await self._everywhere("/roster/commit", self._order_only(), left)
            left = {n: c for n, c in left.items() if isinstance(answers[n], ExpertNetworkError)}
            if not left:
                return
            if monotonic() >= deadline:
                break
            await asyncio.sleep(AGAIN_S)
        epoch = self.order[0]
        reasons = "; ".join(str(answers[name]).removesuffix(".") for name in left)
        raise NetworkMismatch(
            f"epoch {epoch} began without {', '.join(left)} ({reasons}); each follows when it "
            "reaches a node that has begun it, or run the same command again."
        )

    def _seat(self, name: str, answer: Any) -> Seat:
        if isinstance(answer, ExpertNetworkError):
            raise answer
        seat = Seat.read(self._clients[name].url, answer)
        if seat.node != name:
            problem = f"is node {seat.node}, where node {name} was expected"
            raise NodeRefused(seat.url, problem, "check the addresses")
        pending = seat.pending
        if pending is not None and pending.order != self.order and seat.order != self.order:
            raise NetworkMismatch(
                f"{printable(pending.proposer)} is setting another roster (epoch "
                f"{pending.order[0]}) at node {name}, and it goes first; wait until that is done, "
                "then run the command again."
            )
        if pending is not None and pending.error is not None:
            problem = f"cannot take its part of the new roster: {pending.error}"
            raise NodeRefused(name, problem, "change its weight, or see to what it says")
        return seat

    def _order_only(self) -> dict[str, Any]:
        return {"epoch": self.order[0], "digest": self.order[1]}

    async def _everywhere(
        self,
        path: str,
        message: Mapping[str, Any],
        clients: Mapping[str, ControlClient] | None = None,
    ) -> dict[str, Any]:
        """Each node's answer, or the error that it failed with."""

        async def one(client: ControlClient) -> Any:
            try:
                return await client.post_json(path, message)
            except ExpertNetworkError as error:
                return error

        asked = self._clients if clients is None else clients
        answers = await asyncio.gather(*map(one, asked.values()))
        return dict(zip(asked, answers, strict=True))


async def cancel(urls: Iterable[str], order: Order, key: ClusterKey | None) -> None:
    """Have nodes give up a proposed roster, as far as they can be reached."""

    async def one(url: str) -> None:
        try:
            async with ControlClient(url, key, silence=SILENCE_S) as client:
                await client.post_json("/roster/cancel", {"epoch": order[0], "digest": order[1]})
        except ExpertNetworkError:
            return  # it has none, or says so when it is proposed another one

    await asyncio.gather(*map(one, urls))


def _is_ready(seat: Seat, order: Order) -> bool:
    return seat.pending is not None and seat.pending.order == order and seat.pending.ready


def _pending(table: Mapping[str, Any]) -> Pending:
    error = table["error"]
    return Pending(
        (_count(table["epoch"]), _text(table["digest"])),
        _text(table["proposer"]),
        _count(table["done"]),
        _count(table["total"]),
        table["ready"] is True,
        None if error is None else printable(str(error)),
    )


def _check_roster(roster: Mapping[str, Any]) -> None:
    _count(roster["epoch"]), _text(roster["digest"])
    nodes = roster["nodes"]
    if not isinstance(nodes, list) or len(nodes) > MAX_NODES:
        raise ValueError("the nodes are missing")
    for node in nodes:
        if not isinstance(node, list) or len(node) != 2:
            raise ValueError("a node is not a name and a weight")
        _text(node[0])


def _table(value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("a table is missing")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.isprintable() or len(value) > MAX_NAME:
        raise ValueError("a text is missing")
    return value


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError("a number is missing")
    return value

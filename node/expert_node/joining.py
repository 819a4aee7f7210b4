"""A node that takes itself into a network, and out of it again: `--join`."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from expert_network.errors import (
    ExpertNetworkError,
    InputError,
    NetworkMismatch,
    NodeRefused,
    RosterError,
)
from expert_network.net.address import format_url, is_ip, parse_url
from expert_network.net.auth import ClusterKey
from expert_network.net.rosters import Change, Seat, ask_all
from expert_node.membership import Membership, wire
from expert_roster.roster import Roster

log = logging.getLogger("expert_node")

#: For a node to take its part of the network, or to hand it over to others.
JOIN_S = 3600.0
#: Somebody else may be setting a roster: how often it is tried, and after how long again.
TRIES, AGAIN_S = 20, 3.0
#: Once a node has left, for drivers to hear of it in their next replies.
NEWS_S = 5.0


@dataclass(frozen=True)
class Invitation:
    """What the nodes of a network say to one that wants to join: `addresses` are all of theirs."""

    model_digest: str
    roster: Roster
    addresses: Mapping[str, str]

    def without(self, name: str) -> Invitation:
        """For a node that is in the roster already, as after a crash: what it begins with.

        It then follows the others to the roster that they serve.
        """
        if name not in self.roster.names:
            return self
        nodes = tuple(node for node in self.roster.nodes if node[0] != name)
        if not nodes:
            raise RosterError(f"node {name} is alone in its roster; start it with --roster {name}.")
        roster = Roster(nodes, min(self.roster.replicas, len(nodes)))
        return Invitation(self.model_digest, roster, self.addresses)


async def invitation(urls: Sequence[str], key: ClusterKey | None, me: str) -> Invitation:
    """Ask the nodes at `urls`. Raises what the first fails with; NetworkMismatch if they differ.

    Some may fail, as long as the address of every node of the roster is known.
    """
    answers = await ask_all(urls, key)
    seats = [answer for answer in answers.values() if isinstance(answer, Seat)]
    if not seats:
        raise next(a for a in answers.values() if isinstance(a, ExpertNetworkError))
    if len({seat.model_digest for seat in seats}) > 1:
        listed = ", ".join(f"{seat.node}: {seat.model_digest[:12]}" for seat in seats)
        raise NetworkMismatch(
            f"the nodes of --join serve different models ({listed}); name those of one network."
        )
    newest = newest_of(seats)
    addresses = {name: url for seat in seats for name, url in seat.addresses.items()}
    addresses |= {seat.node: seat.url for seat in seats}
    absent = [name for name in newest.names if name not in addresses and name != me]
    if absent:
        raise InputError(
            f"the address of {', '.join(absent)} is not known to the nodes of --join; name all "
            "nodes there: --join URL,URL."
        )
    known = {name: addresses[name] for name in newest.names if name in addresses}
    return Invitation(newest.model_digest, Roster.from_wire(newest.roster), known)


def newest_of(seats: Sequence[Seat]) -> Seat:
    """The seat of the latest roster."""
    return max(seats, key=lambda seat: seat.order)


def own_url(host: str, port: int, towards: str) -> str:
    """How others reach a node that listens on `host`: for 0.0.0.0, by the address of this machine
    that leads to the node at `towards`.
    """
    if not (is_ip(host) and set(host) <= set("0.:")):
        return format_url(host, port)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect(parse_url(towards))  # sends nothing
        except OSError as error:
            raise InputError(
                f"no address of this machine leads to {towards} ({error.strerror or error}); give "
                "the one that others reach it by with --url."
            ) from error
        return format_url(probe.getsockname()[0], port)


class Joining:
    """One node's way in and out. `url` is how the others reach it."""

    def __init__(
        self, membership: Membership, model: str, weight: float, url: str, key: ClusterKey | None
    ) -> None:
        self._membership, self._model, self._weight = membership, model, weight
        self._url, self._key = url, key

    async def join(self, told: Callable[[int, int], None], seconds: float = JOIN_S) -> None:
        """Be in the roster that all nodes serve, with the blocks that it gives this node.

        told: bytes gained, of bytes. Raises what keeps it from that.
        """
        me = self._membership.name

        def more(roster: Roster) -> Roster | None:
            if me in roster.names:
                return None
            nodes = (*roster.nodes, (me, self._weight))
            return Roster(nodes, roster.replicas, roster.epoch + 1)

        await self._change(more, {me: self._url}, told, seconds)
        try:
            async with asyncio.timeout(seconds):
                await self._membership.is_member()
        except TimeoutError:
            raise NetworkMismatch(
                f"node {me} is in the roster of the others and did not get its blocks within "
                f"{seconds:g} s; see its log."
            ) from None

    async def leave(self, seconds: float) -> None:
        """Hand all blocks over to the others. Raises what keeps it from that."""
        me = self._membership.name

        def fewer(roster: Roster) -> Roster | None:
            nodes = tuple(node for node in roster.nodes if node[0] != me)
            if len(nodes) == len(roster.nodes) or not nodes:
                return None  # it is gone already, or the last one
            return Roster(nodes, min(roster.replicas, len(nodes)), roster.epoch + 1)

        await self._change(fewer, {me: self._url}, lambda done, total: None, seconds)

    async def _change(
        self,
        change: Callable[[Roster], Roster | None],
        more: Mapping[str, str],
        told: Callable[[int, int], None],
        seconds: float,
    ) -> None:
        """Set what `change` makes of the latest roster; None: there is nothing to do.

        Others who set one at the same time may go first; then it is made anew.
        """
        for attempt in range(TRIES):
            addresses = {**self._membership.addresses, **more}
            answers = (await ask_all(addresses.values(), self._key)).values()
            newest = newest_of([answer for answer in answers if isinstance(answer, Seat)])
            roster = change(Roster.from_wire(newest.roster))
            if roster is None:
                return
            addresses |= newest.addresses
            try:
                await self._set(roster, addresses, told, seconds)
                return
            except (NetworkMismatch, NodeRefused) as error:
                busy = isinstance(error, NetworkMismatch) or error.code == 409
                if not busy or attempt == TRIES - 1:
                    raise
                log.info("tried again in %g s: %s", AGAIN_S, error)
                await asyncio.sleep(AGAIN_S)

    async def _set(
        self,
        roster: Roster,
        addresses: Mapping[str, str],
        told: Callable[[int, int], None],
        seconds: float,
    ) -> None:
        me = self._membership.name

        def heard(seats: Sequence[Seat]) -> None:
            pending = [seat.pending for seat in seats if seat.pending is not None]
            told(sum(each.done for each in pending), sum(each.total for each in pending))

        async with Change(self._model, wire(roster), f"node {me}", addresses, self._key) as change:
            await change.gain(heard, seconds)
            await change.commit()

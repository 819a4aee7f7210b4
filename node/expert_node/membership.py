"""Joining and leaving: the roster that a node serves, and at most one that is proposed to it.

A proposer asks all nodes of the old and of the new roster. Each begins to gain the blocks that the
new one gives it and still answers for the old one. When all are ready they flip; what a node lost
it keeps for a while, until drivers have flipped too. Of two proposals the one of the higher epoch,
then of the higher digest, goes first. docs/roster.md has the rules.

`Membership` decides; what moves blocks is handed to it as a `Mover`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from expert_network.errors import ExpertNetworkError, RosterError
from expert_network.net.address import parse_url
from expert_network.net.auth import ClusterKey
from expert_network.net.rosters import MAX_NAME, Order, Seat, ask_all, read_addresses
from expert_network.units import size
from expert_roster.rendezvous import partition
from expert_roster.roster import Roster

log = logging.getLogger("expert_node")

Blocks = Mapping[int, NDArray[np.intp]]


@dataclass(frozen=True)
class Times:
    """Seconds."""

    #: Without a word from its proposer, until a proposal is given up.
    lease: float = 30.0
    #: From a flip until lost blocks are let go, if a driver has a link: it hears of the new epoch
    #: in the next reply, or from a ping, which an idle driver sends before it uses a link again.
    grace: float = 60.0
    #: Between two looks whether others have begun a later epoch.
    look: float = 30.0


class Conflict(Exception):
    """Why a proposal, a commit or a cancel is refused: a sentence."""


@dataclass(frozen=True)
class Proposal:
    """A roster for a model, who wants it, and where the nodes of both rosters are."""

    model: str
    roster: Roster
    proposer: str
    addresses: Mapping[str, str]

    @property
    def order(self) -> Order:
        return self.roster.epoch, self.roster.digest

    @classmethod
    def read(cls, message: object) -> Proposal:
        """From the JSON of /roster/propose. Raises RosterError for anything else."""
        if not isinstance(message, dict):
            raise RosterError("the proposal is not a table; see docs/roster.md.")
        roster = Roster.from_wire(message.get("roster"))
        model, proposer = message.get("model"), message.get("proposer")
        for text in (model, proposer):
            if not isinstance(text, str) or not text.isprintable() or len(text) > MAX_NAME:
                raise RosterError("the proposal has no model or no proposer; see docs/roster.md.")
        try:
            addresses = read_addresses(message.get("addresses"))
            for url in addresses.values():
                parse_url(url)
        except (ValueError, ExpertNetworkError) as error:
            raise RosterError(f"the proposal's addresses are not understood: {error}") from None
        return cls(str(model), roster, str(proposer), addresses)


class Mover(Protocol):
    """What moves blocks. `blocks` are experts by layer."""

    def missing(self, blocks: Blocks) -> int:
        """Bytes of those that are not held."""

    async def gain(self, blocks: Blocks, urls: Iterable[str], going: Callable[[int], bool]) -> None:
        """Hold them too, from the disk or from the nodes at `urls`, each verified.

        going: is told of bytes that are held now; False ends it. Raises ExpertNetworkError.
        """

    async def release(self, kept: Callable[[], Blocks]) -> None:
        """Hold no others. `kept` is asked again as it goes on: more may be wanted meanwhile."""

    @property
    def fetched(self) -> int:
        """Bytes that came from other nodes since the start."""

    @property
    def drivers(self) -> int:
        """Links that are open."""


@dataclass
class _Pending:
    """A proposal at hand. `settled`: others have begun it, so it is never given up."""

    proposal: Proposal
    settled: bool
    until: float
    total: int
    done: int = 0
    ready: bool = False
    error: str | None = None
    #: Set with `ready` or `error`, or when it is no longer at hand.
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Membership:
    """One node's seat. Used on the event loop, where `run` has to be running.

    flipped: is told of each roster that the node begins to serve. addresses: of the nodes of
    `roster`, as far as they are known. peers: more URLs where a later epoch may be heard of.
    """

    def __init__(
        self,
        name: str,
        model: str,
        shape: list[tuple[int, int]],
        roster: Roster,
        mover: Mover,
        flipped: Callable[[Roster], None],
        key: ClusterKey | None = None,
        addresses: Mapping[str, str] | None = None,
        peers: Iterable[str] = (),
        times: Times | None = None,
    ) -> None:
        self.name, self._model, self._shape = name, model, shape
        self.roster, self.addresses = roster, dict(addresses or {})
        #: Addresses of nodes that may know of a later epoch.
        self._peers = {*peers, *self.addresses.values()}
        self._mover, self._flipped, self._key = mover, flipped, key
        self._times = times or Times()
        self._pending: _Pending | None = None
        self._release_at: float | None = None
        self._look_at = monotonic()
        self._changed, self._begun = asyncio.Event(), asyncio.Event()

    # What is said and asked

    @property
    def order(self) -> Order:
        """What tells the roster that is served from others."""
        return self.roster.epoch, self.roster.digest

    def seat(self) -> dict[str, Any]:
        """The body of /roster."""
        pending = self._pending
        return {
            "node": self.name,
            "model_digest": self._model,
            "roster": wire(self.roster),
            "addresses": self.addresses,
            "fetched": self._mover.fetched,
            "pending": pending
            and {
                "epoch": pending.proposal.order[0],
                "digest": pending.proposal.order[1],
                "proposer": pending.proposal.proposer,
                "done": pending.done,
                "total": pending.total,
                "ready": pending.ready,
                "error": pending.error,
            },
        }

    def propose(self, proposal: Proposal) -> asyncio.Event | None:
        """Take a proposal, or hear again of the one at hand, which keeps it alive.

        An event that is set once there is an end to it; None if the roster is served already.
        Raises Conflict.
        """
        pending, order = self._pending, proposal.order
        if proposal.model != self._model:
            raise Conflict(
                f"node {self.name} serves model {self._model[:12]} and the roster is for model "
                f"{proposal.model[:12]}"
            )
        if order == self.order:
            return None
        if proposal.roster.epoch <= self.roster.epoch:
            raise Conflict(
                f"node {self.name} is at epoch {self.roster.epoch} already and epoch "
                f"{proposal.roster.epoch} is proposed; ask for the rosters again"
            )
        if pending is not None and pending.proposal.order == order:
            pending.until = monotonic() + self._times.lease
            return pending.over
        if pending is not None and pending.proposal.order > order:
            raise Conflict(
                f"{pending.proposal.proposer} is setting another roster (epoch "
                f"{pending.proposal.order[0]}) at node {self.name}; wait until that is done"
            )
        return self._begin(proposal, settled=False).over

    def commit(self, order: Order) -> None:
        """Flip to the roster that was proposed and gained. Raises Conflict."""
        pending = self._pending
        if order == self.order:
            return
        if order > self.order:
            self._look_soon()  # others may have begun it
        if pending is None or pending.proposal.order != order:
            raise Conflict(
                f"node {self.name} was not proposed this roster, or has given it up; propose it "
                "again"
            )
        if not pending.ready:
            raise Conflict(f"node {self.name} does not have all its blocks of this roster yet")
        self._flip(pending)

    def cancel(self, order: Order) -> None:
        """Give up a proposal; one that is not at hand is no matter. Raises Conflict once begun."""
        if order == self.order:
            raise Conflict(f"node {self.name} has begun epoch {order[0]}; set another roster")
        if self._pending is not None and self._pending.proposal.order == order:
            self._give_up(self._pending, "its proposer has cancelled it")

    # What is done, one thing after the other

    async def is_member(self) -> None:
        """Until this node is in the roster that it serves."""
        while self.name not in self.roster.names:
            self._begun.clear()
            await self._begun.wait()

    async def run(self) -> None:
        """Gain, give up, release and catch up, as each falls due. Never returns."""
        while True:
            self._changed.clear()
            pending, now = self._pending, monotonic()
            if pending is not None and self._expired(pending):
                await self._ask_whether_begun(pending)
            elif pending is not None and not pending.over.is_set():
                await self._gain(pending)
            elif self._release_at is not None and self._may_release(now):
                self._release_at = None
                await self._mover.release(self._kept)
            elif now >= self._look_at:
                await self._look()
            else:
                await self._wait(now)

    def _may_release(self, now: float) -> bool:
        return self._release_at is not None and (now >= self._release_at or not self._mover.drivers)

    async def _wait(self, now: float) -> None:
        """Until something is asked or the next thing falls due."""
        due = [self._look_at]
        if self._release_at is not None:
            due.append(self._release_at)
        if self._pending is not None and not self._pending.settled:
            due.append(self._pending.until)
        try:
            async with asyncio.timeout(max(0.0, min(due) - now)):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def _gain(self, pending: _Pending) -> None:
        def going(count: int) -> bool:
            pending.done += count
            return self._pending is pending and not self._expired(pending)

        try:
            blocks = self._blocks(pending.proposal.roster)
            await self._mover.gain(blocks, self._sources(pending), going)
        except ExpertNetworkError as error:
            log.warning("node %s cannot take its part of a new roster: %s", self.name, error)
            pending.error = str(error).removesuffix(".")
            pending.over.set()
            if pending.settled:
                self._drop(pending)  # `_look` begins it anew
            return
        if self._pending is not pending or self._mover.missing(blocks):
            return
        pending.ready = True
        pending.over.set()
        if pending.settled:
            self._flip(pending)

    async def _look(self) -> None:
        """Begin a later epoch if others have."""
        self._look_at = monotonic() + self._times.look
        found = await self._others(self._peers)
        # A roster from the command line is nobody's decision: it has epoch 0.
        later = [seat for seat in found if seat.order[0] > 0 and seat.order > self.order]
        if later:
            self._follow(max(later, key=lambda seat: seat.order))

    async def _ask_whether_begun(self, pending: _Pending) -> None:
        """A proposer that fell silent may have had others flip: then flip too."""
        found = await self._others(pending.proposal.addresses.values())
        if self._pending is not pending or not self._expired(pending):
            return
        if any(seat.order == pending.proposal.order for seat in found):
            pending.settled = True
            if pending.ready:
                self._flip(pending)
        else:
            self._give_up(pending, f"its proposer has said nothing for {self._times.lease:g} s")

    def _follow(self, seat: Seat) -> None:
        try:
            roster = Roster.from_wire(seat.roster)
        except RosterError as error:
            log.warning("node %s sends a roster that is none: %s", seat.url, error)
            return
        if self._pending is not None and self._pending.proposal.order >= seat.order:
            return
        log.info("node %s has begun epoch %d", seat.node, roster.epoch)
        addresses = {**self.addresses, **seat.addresses, seat.node: seat.url}
        self._begin(Proposal(self._model, roster, f"node {seat.node}", addresses), settled=True)

    async def _others(self, urls: Iterable[str]) -> list[Seat]:
        """What those say that can be reached and serve this model."""
        answers = (await ask_all(sorted(urls), self._key)).values()
        seats = [answer for answer in answers if isinstance(answer, Seat)]
        return [s for s in seats if s.model_digest == self._model and s.node != self.name]

    # Steps

    def _begin(self, proposal: Proposal, settled: bool) -> _Pending:
        if self._pending is not None:
            self._drop(self._pending)
        self._peers.update(proposal.addresses.values())
        total = self._mover.missing(self._blocks(proposal.roster))
        until = monotonic() + self._times.lease
        self._pending = _Pending(proposal, settled, until, total)
        epoch = proposal.roster.epoch
        log.info("%s proposes epoch %d: %s to gain", proposal.proposer, epoch, size(total))
        self._changed.set()
        return self._pending

    def _flip(self, pending: _Pending) -> None:
        self.roster, addresses = pending.proposal.roster, pending.proposal.addresses
        self.addresses = {n: url for n, url in addresses.items() if n in self.roster.names}
        # Who has left need not be asked any more.
        self._peers = set(self.addresses.values())
        self._drop(pending)
        self._release_at = monotonic() + self._times.grace
        log.info("node %s begins epoch %d", self.name, self.roster.epoch)
        self._flipped(self.roster)
        self._begun.set()

    def _give_up(self, pending: _Pending, why: str) -> None:
        log.warning("epoch %d is given up: %s", pending.proposal.roster.epoch, why)
        self._drop(pending)
        self._release_at = monotonic()
        self._look_soon()

    def _look_soon(self) -> None:
        self._look_at = monotonic()
        self._changed.set()

    def _drop(self, pending: _Pending) -> None:
        pending.over.set()
        self._pending = None
        self._changed.set()

    def _expired(self, pending: _Pending) -> bool:
        return not pending.settled and monotonic() >= pending.until

    def _sources(self, pending: _Pending) -> list[str]:
        found = {**self.addresses, **pending.proposal.addresses}
        return [url for name, url in found.items() if name != self.name]

    def _blocks(self, roster: Roster) -> Blocks:
        return blocks_of(roster, self.name, self._shape)

    def _kept(self) -> Blocks:
        """What is owned, and what is to be."""
        kept = self._blocks(self.roster)
        if self._pending is None:
            return kept
        more = self._blocks(self._pending.proposal.roster)
        return {layer: np.union1d(experts, more[layer]) for layer, experts in kept.items()}


def read_order(message: object) -> Order:
    """From the JSON of /roster/commit and /roster/cancel. Raises RosterError."""
    if isinstance(message, dict):
        epoch, digest = message.get("epoch"), message.get("digest")
        if type(epoch) is int and isinstance(digest, str):
            return epoch, digest
    raise RosterError("this names no roster; give its epoch and its digest.")


def blocks_of(roster: Roster, name: str, shape: list[tuple[int, int]]) -> Blocks:
    """What `roster` gives node `name`: experts of each layer, none if it is not in there."""
    if name in roster.names:
        return partition(roster, name, shape)
    return {layer: np.empty(0, np.intp) for layer, _ in shape}


def wire(roster: Roster) -> dict[str, Any]:
    """A roster as it travels in JSON, with its digest."""
    return {**roster.to_wire(), "digest": roster.digest}

"""Giving a network another roster: what it would move, how long that takes, and doing it."""

from __future__ import annotations

import getpass
import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from time import monotonic

from expert_driver.dispatch.agreement import describe
from expert_network.errors import ExpertNetworkError, InputError, NetworkMismatch
from expert_network.net.auth import ClusterKey
from expert_network.net.control import ControlClient
from expert_network.net.rosters import Change, Seat, ask_all, cancel
from expert_network.places import MANIFEST
from expert_network.progress import Progress
from expert_network.store.manifest import MAX_MANIFEST, Manifest
from expert_roster.diff import NodeBytes, RosterDiff, diff
from expert_roster.roster import Roster

#: For all gainers to be ready. A terabyte over a gigabit network takes three hours.
GAIN_S = 24 * 3600.0
#: How long blocks are fetched to see how fast that is, and at most how many.
RATE_S, RATE_BLOCKS = 1.0, 8

GAINING = "moving blocks"


@dataclass(frozen=True)
class Network:
    """What the nodes say of their rosters. `silent` are the addresses that say nothing, and why."""

    seats: tuple[Seat, ...]
    silent: Mapping[str, ExpertNetworkError]

    @cached_property
    def newest(self) -> Seat:
        """A node with the latest roster. Of those from command lines, that of most nodes."""
        count = Counter(seat.order for seat in self.seats)
        return max(self.seats, key=lambda s: (s.order[0], count[s.order], s.order[1]))

    @cached_property
    def roster(self) -> Roster:
        """The latest roster."""
        return Roster.from_wire(self.newest.roster)

    @property
    def late(self) -> tuple[Seat, ...]:
        """Nodes of another roster than the latest."""
        return tuple(seat for seat in self.seats if seat.order != self.newest.order)

    @property
    def pending(self) -> tuple[Seat, ...]:
        """Nodes that somebody is proposing a roster to."""
        return tuple(seat for seat in self.seats if seat.pending is not None)

    @property
    def next_epoch(self) -> int:
        """One more than any that has been begun or proposed."""
        seen = [seat.order[0] for seat in self.seats]
        return 1 + max(seen + [seat.pending.order[0] for seat in self.seats if seat.pending])


async def look(urls: Sequence[str], key: ClusterKey | None) -> Network:
    """Ask the nodes at `urls`, and those that they know of.

    Raises what the first fails with if none answers; NetworkMismatch if their models differ.
    """
    answers = await ask_all(urls, key)
    known = {s.url for s in answers.values() if isinstance(s, Seat)}
    more = {url for s in answers.values() if isinstance(s, Seat) for url in s.addresses.values()}
    answers |= await ask_all(sorted(more - known - set(urls)), key)
    seats = {seat.node: seat for seat in answers.values() if isinstance(seat, Seat)}
    silent = {url: error for url, error in answers.items() if isinstance(error, ExpertNetworkError)}
    if not seats:
        raise next(iter(silent.values()))
    if len({seat.model_digest for seat in seats.values()}) > 1:
        listed = "; ".join(f"{s.node}: {s.model_digest[:12]}" for s in seats.values())
        raise NetworkMismatch(
            f"the nodes serve different models ({listed}); name the nodes of one network."
        )
    return Network(tuple(seats.values()), silent)


@dataclass(frozen=True)
class Plan:
    """`old` becomes `new`. `rate` is in bytes a second, None where nothing moves.

    addresses: of the nodes that take part. gone: nodes of the old roster that do not answer, and
    are not in the new one.
    """

    model: str
    old: Roster
    new: Roster
    diff: RosterDiff
    sizes: Mapping[str, NodeBytes]
    addresses: Mapping[str, str]
    gone: tuple[str, ...]
    rate: float | None

    @property
    def bytes(self) -> int:
        """What moves, all together."""
        return sum(node.gained for node in self.sizes.values())

    @property
    def seconds(self) -> float:
        """About how long that takes: gainers fetch side by side, each as fast as was measured."""
        most = max((node.gained for node in self.sizes.values()), default=0)
        return most / self.rate if self.rate else 0.0


async def plan(network: Network, new: Roster, key: ClusterKey | None) -> Plan:
    """What `new` would move. Raises InputError for a node of it that does not answer."""
    seats = {seat.node: seat for seat in network.seats}
    absent = [name for name in new.names if name not in seats]
    if absent:
        reasons = "; ".join(str(error).removesuffix(".") for error in network.silent.values())
        raise InputError(
            f"no node {', '.join(absent)} answers{f' ({reasons})' if reasons else ''}; start it "
            "and name its address in --nodes, or leave it out of the roster."
        )
    newest = network.newest
    async with ControlClient(newest.url, key) as client:
        manifest = Manifest.from_bytes(
            await client.get_bytes("/manifest", MAX_MANIFEST), f"{newest.url}/{MANIFEST}"
        )
        moves = diff(network.roster, new, manifest.shape)
        rate = await _rate(client, manifest, moves) if moves.moves else None
    sizes = moves.node_bytes({spec.layer: spec.block_bytes for spec in manifest.layers})
    taking = [name for name in dict.fromkeys((*network.roster.names, *new.names)) if name in seats]
    addresses = {name: seats[name].url for name in taking}
    gone = tuple(name for name in network.roster.names if name not in seats)
    model = newest.model_digest
    return Plan(model, network.roster, new, moves, sizes, addresses, gone, rate)


async def _rate(client: ControlClient, manifest: Manifest, moves: RosterDiff) -> float:
    """Bytes a second that a node gives blocks with, measured on a few that will move."""
    done, began = 0, monotonic()
    for move in moves.moves[:RATE_BLOCKS]:
        size = manifest.layer(move.layer).block_bytes
        try:
            done += len(await client.get_bytes(f"/block/{move.layer}/{move.expert}", size))
        except ExpertNetworkError:
            continue  # another node's
        if monotonic() - began > RATE_S:
            break
    return done / max(monotonic() - began, 1e-6)


async def carry_out(plan: Plan, key: ClusterKey | None, report: Progress) -> None:
    """Have all nodes gain, then flip. Raises what keeps them from it; see Change."""

    def told(seats: Sequence[Seat]) -> None:
        done = sum(seat.pending.done if seat.pending else 0 for seat in seats)
        total = sum(seat.pending.total if seat.pending else 0 for seat in seats)
        if total:
            report(min(done, total), total, GAINING)

    roster = {**plan.new.to_wire(), "digest": plan.new.digest}
    async with Change(plan.model, roster, proposer(), plan.addresses, key) as change:
        await change.gain(told, GAIN_S)
        await change.commit()


async def give_up_others(network: Network, key: ClusterKey | None) -> None:
    """Have nodes forget what somebody else is proposing."""
    for seat in network.pending:
        assert seat.pending is not None
        await cancel([seat.url], seat.pending.order, key)


def disagreements(network: Network) -> list[str]:
    """Who has which roster where they differ, and who is being proposed one; a sentence each."""
    found = []
    if network.late:
        by_order: dict[tuple[int, str], list[str]] = {}
        for seat in network.seats:
            text = f"{describe(Roster.from_wire(seat.roster))}"
            by_order.setdefault((seat.order[0], text), []).append(seat.node)
        listed = "; ".join(
            f"{', '.join(names)}: {text} (epoch {epoch})"
            for (epoch, text), names in sorted(by_order.items())
        )
        found.append(f"the nodes have different rosters ({listed}).")
    for seat in network.pending:
        assert seat.pending is not None
        found.append(
            f"{seat.pending.proposer} is proposing epoch {seat.pending.order[0]} to node "
            f"{seat.node}."
        )
    for url, error in network.silent.items():
        found.append(f"{url} does not answer: {str(error).removesuffix('.')}.")
    return found


def proposer() -> str:
    """Who sets a roster, for others who meet it: user, machine and process."""
    return f"{_user()}@{socket.gethostname()} (process {os.getpid()})"


def _user(ask: Callable[[], str] = getpass.getuser) -> str:
    try:
        return ask()
    except (KeyError, OSError):  # a container's user has no name
        return "somebody"

"""Whether nodes that have introduced themselves can work together, and who computes what.

Pure decisions: WELCOMEs in, an Agreement or one sentence that says what to do out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from expert_network.errors import NetworkMismatch, RosterError
from expert_protocol.dtypes import WireDType
from expert_protocol.greetings import Welcome
from expert_protocol.header import VERSION
from expert_roster.rendezvous import owner_order, owner_table
from expert_roster.roster import Roster

Shape = Sequence[tuple[int, int]]
_LISTED = 8  # nodes named in one sentence


@dataclass(frozen=True)
class Greeting:
    """A node's WELCOME and the address that was asked."""

    url: str
    welcome: Welcome

    @cached_property
    def roster(self) -> Roster:
        """Raises NetworkMismatch if what the node sent is not one."""
        try:
            return Roster.from_wire(self.welcome.roster)
        except RosterError as error:
            raise NetworkMismatch(f"node {self} sends a roster that is none: {error}") from error

    @property
    def name(self) -> str:
        return self.welcome.node

    def __str__(self) -> str:
        return f"{self.name} ({self.url})"


@dataclass(frozen=True)
class Wanted:
    """What the driver brings along. `shape` lists (layer, number of experts) of its model.

    `row_bytes` is the payload of the largest dispatch that a single row can need.
    """

    model_digest: str
    shape: Shape
    compute_dtype: str
    exact: bool
    wire: WireDType
    row_bytes: int


@dataclass(frozen=True)
class Agreement:
    """`nodes` in the order of their roster, whatever order they were given in.

    `chosen` maps a layer to int32 (experts,): the position in `nodes` of the first owner that is
    there, or else of the first node of the owner order. That one does not own the block and is to
    adopt it: `adopted` says so, bool (experts,), of the layers with such blocks.
    """

    roster: Roster
    nodes: tuple[Greeting, ...]
    chosen: dict[int, npt.NDArray[np.int32]]
    adopted: dict[int, npt.NDArray[np.bool_]] = field(default_factory=dict)


def agree(greetings: Sequence[Greeting], wanted: Wanted, away: int = 0) -> Agreement:
    """Check all nodes against each other and against `wanted`. Raises NetworkMismatch.

    away: how many nodes were asked for and do not answer; others adopt what only those own.
    """
    for greeting in greetings:
        _check_version(greeting)
    _check_names(greetings)
    _check_models(greetings, wanted.model_digest)
    _check_rosters(greetings)
    _check_dtypes(greetings, wanted)
    _check_limits(greetings, wanted.row_bytes)
    if wanted.exact:
        _check_numerics(greetings, wanted)
    roster = latest(greetings)
    # A node that has left the network still runs until drivers have heard of it.
    present = [greeting for greeting in greetings if greeting.name in roster.names]
    nodes = tuple(sorted(present, key=lambda greeting: roster.index(greeting.name)))
    return _choose(roster, nodes, wanted.shape, away)


def latest(greetings: Sequence[Greeting]) -> Roster:
    """The roster of the latest epoch: nodes that have not begun it yet are about to."""
    return max((greeting.roster for greeting in greetings), key=lambda roster: roster.epoch)


def _check_version(greeting: Greeting) -> None:
    if greeting.welcome.protocol != VERSION:
        raise NetworkMismatch(
            f"node {greeting} speaks protocol version {greeting.welcome.protocol} and this driver "
            f"version {VERSION}; install the same expert-network on both."
        )


def _check_names(greetings: Sequence[Greeting]) -> None:
    seen: dict[str, Greeting] = {}
    for greeting in greetings:
        other = seen.setdefault(greeting.name, greeting)
        if other is not greeting:
            raise NetworkMismatch(
                f"{other.url} and {greeting.url} are both node {greeting.name}; name a node once "
                "in --nodes, and start every node with a --me of its own."
            )


def _check_models(greetings: Sequence[Greeting], digest: str) -> None:
    others = [greeting for greeting in greetings if greeting.welcome.model_digest != digest]
    if not others:
        return
    held = others[0].welcome.model_digest
    advice = "start them with the store this driver has"
    if len(others) == len(greetings):
        advice = "leave STORE out to fetch theirs from a peer, or start them with this store"
    raise NetworkMismatch(
        f"{_nodes(others)} another model ({held[:12]}) than this driver's store ({digest[:12]}); "
        f"{advice}."
    )


def _check_rosters(greetings: Sequence[Greeting]) -> None:
    epoch = latest(greetings).epoch
    counts = Counter(g.roster.digest for g in greetings if g.roster.epoch == epoch)
    if len(counts) > 1:
        digest = counts.most_common(1)[0][0]
        most = next(greeting for greeting in greetings if greeting.roster.digest == digest)
        other = next(
            greeting
            for greeting in greetings
            if greeting.roster.epoch == epoch and greeting.roster.digest != digest
        )
        raise NetworkMismatch(
            f"node {other} has the roster {describe(other.roster)} and node {most} the roster "
            f"{describe(most.roster)}; start all nodes with the same --roster."
        )
    for greeting in greetings:
        if not epoch and greeting.name not in greeting.roster.names:
            raise NetworkMismatch(
                f"node {greeting} is not in its own roster {describe(greeting.roster)}; start it "
                "again with a --me from that roster."
            )


def _check_dtypes(greetings: Sequence[Greeting], wanted: Wanted) -> None:
    for greeting in greetings:
        if wanted.wire not in greeting.welcome.dtypes:
            known = ", ".join(dtype.label for dtype in greeting.welcome.dtypes)
            raise NetworkMismatch(
                f"node {greeting} does not take rows as {wanted.wire.label}; choose a --wire that "
                f"it takes ({known})."
            )


def _check_limits(greetings: Sequence[Greeting], row_bytes: int) -> None:
    for greeting in greetings:
        limit = greeting.welcome.max_payload
        if limit < row_bytes:
            raise NetworkMismatch(
                f"node {greeting} takes dispatches of {limit} bytes, and one row of this model can "
                f"need {row_bytes}; install the same expert-network on both."
            )


def _check_numerics(greetings: Sequence[Greeting], wanted: Wanted) -> None:
    ids = {greeting.name: greeting.welcome.numerics for greeting in greetings}
    if len(set(ids.values())) > 1:
        listed = ", ".join(f"{name}: {numerics}" for name, numerics in sorted(ids.items()))
        raise NetworkMismatch(
            f"--exact needs nodes of one numerics id, and these differ ({listed}); leave --exact "
            "out, or use nodes of one kind."
        )
    for greeting in greetings:
        if greeting.welcome.compute_dtype != wanted.compute_dtype:
            raise NetworkMismatch(
                f"--exact needs one compute dtype, and node {greeting} computes in "
                f"{greeting.welcome.compute_dtype} where this driver computes in "
                f"{wanted.compute_dtype}; leave --exact out, or use a driver of the nodes' kind."
            )


def _choose(roster: Roster, nodes: tuple[Greeting, ...], shape: Shape, away: int) -> Agreement:
    """The agreement. Raises if a block has no owner among `nodes`, and no node is away."""
    position = np.full(len(roster.names), -1, np.int32)
    for place, greeting in enumerate(nodes):
        position[roster.index(greeting.name)] = place
    chosen: dict[int, npt.NDArray[np.int32]] = {}
    adopted: dict[int, npt.NDArray[np.bool_]] = {}
    missing: list[tuple[int, int, str]] = []
    for layer, owners in owner_table(roster, shape).items():
        places = position[owners]
        chosen[layer] = first_of(places)
        without = np.flatnonzero(chosen[layer] < 0)
        if len(without) and away:
            chosen[layer][without] = first_of(position[owner_order(roster, layer, without)])
            adopted[layer] = np.isin(np.arange(len(places)), without)
            continue
        for expert in without.tolist():
            missing.append((layer, expert, roster.names[owners[expert, 0]]))
    if missing:
        raise NetworkMismatch(_not_owned(missing, sum(experts for _, experts in shape)))
    return Agreement(roster, nodes, chosen, adopted)


def first_of(places: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """The first of each row (n, R) that is not negative, -1 where all are: (n,)."""
    found: npt.NDArray[np.int32] = places[np.arange(len(places)), (places >= 0).argmax(axis=1)]
    return found


def _not_owned(missing: Sequence[tuple[int, int, str]], total: int) -> str:
    layer, expert, owner = missing[0]
    names = Counter(owner for _, _, owner in missing)
    whose = ", ".join(f"{name}: {count}" for name, count in names.most_common(_LISTED))
    return (
        f"no node of --nodes owns block ({layer}, {expert}), which is {owner}'s; {len(missing)} of "
        f"{total} blocks have no owner there ({whose}); add these nodes to --nodes, or start all "
        "nodes with a roster that names only those that run."
    )


def describe(roster: Roster) -> str:
    """A roster for a person: as --roster takes it, with the replicas if there are any."""
    plain = all(weight == 1 for _, weight in roster.nodes)
    items = [name if plain else f"{name}={weight:g}" for name, weight in roster.nodes[:_LISTED]]
    if len(roster.nodes) > _LISTED:
        items.append("…")
    return ",".join(items) + (f" with {roster.replicas} replicas" if roster.replicas > 1 else "")


def _nodes(greetings: Sequence[Greeting]) -> str:
    listed: list[Any] = list(greetings[:_LISTED])
    if len(greetings) == 1:
        return f"node {listed[0]} has"
    return "nodes " + ", ".join(str(greeting) for greeting in listed) + " have"

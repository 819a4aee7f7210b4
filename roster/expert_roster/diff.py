"""What changes between two rosters: which copies of which blocks go where."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from expert_roster.rendezvous import Indices, owner_table
from expert_roster.roster import Roster


class Move(NamedTuple):
    """`target` becomes an owner of a block; `source` owned it before and can hand it over."""

    layer: int
    expert: int
    source: str
    target: str


class NodeChange(NamedTuple):
    """Copies a node owns `before` and `after`, and how many of those after it has to fetch."""

    name: str
    before: int
    after: int
    fetched: int

    @property
    def released(self) -> int:
        """How many of those before it no longer owns."""
        return self.before - self.after + self.fetched


class NodeBytes(NamedTuple):
    """Bytes that a node fetches, and bytes that it no longer has to hold."""

    gained: int
    lost: int


@dataclass(frozen=True)
class RosterDiff:
    """Every copy that a node of the new roster has to fetch, and the counts around it.

    A copy is one block at one of its R owners, so `total`, the copies under the new roster, is
    blocks x R, and `kept + moved == total`.
    """

    total: int
    moves: tuple[Move, ...]
    nodes: tuple[NodeChange, ...]
    #: Copies that each node owns more than before, by layer.
    growth: Mapping[str, Mapping[int, int]]

    @property
    def moved(self) -> int:
        """Copies to fetch."""
        return len(self.moves)

    @property
    def kept(self) -> int:
        """Copies that stay where they are."""
        return self.total - self.moved

    @cached_property
    def pairs(self) -> dict[tuple[str, str], int]:
        """Copies by (source, target), sorted by name."""
        return dict(sorted(Counter((move.source, move.target) for move in self.moves).items()))

    def pair_bytes(self, block_bytes: Mapping[int, int]) -> dict[tuple[str, str], int]:
        """Bytes by (source, target); `block_bytes` gives the size of one block of each layer."""
        sizes: Counter[tuple[str, str]] = Counter()
        for move in self.moves:
            sizes[move.source, move.target] += block_bytes[move.layer]
        return dict(sorted(sizes.items()))

    def node_bytes(self, block_bytes: Mapping[int, int]) -> dict[str, NodeBytes]:
        """What each node fetches and gives up; `block_bytes` as for pair_bytes."""
        gained: Counter[str] = Counter()
        for (_, target), size in self.pair_bytes(block_bytes).items():
            gained[target] += size
        found = {}
        for name, layers in self.growth.items():
            more = sum(count * block_bytes[layer] for layer, count in layers.items())
            found[name] = NodeBytes(gained[name], gained[name] - more)
        return found


def diff(old: Roster, new: Roster, shape: Sequence[tuple[int, int]]) -> RosterDiff:
    """What has to move when `old` becomes `new`; `shape` lists (layer, number of experts)."""
    before, after = owner_table(old, shape), owner_table(new, shape)
    moves = tuple(_moves(old, new, before, after))
    fetched = Counter(move.target for move in moves)
    had, has = _copies(old, before), _copies(new, after)
    names = sorted({*old.names, *new.names})
    nodes = tuple(
        NodeChange(name, had[name].total(), has[name].total(), fetched[name]) for name in names
    )
    growth = {
        name: {layer: has[name][layer] - had[name][layer] for layer in before} for name in names
    }
    return RosterDiff(sum(copies.total() for copies in has.values()), moves, nodes, growth)


def _moves(
    old: Roster, new: Roster, before: Mapping[int, Indices], after: Mapping[int, Indices]
) -> Iterator[Move]:
    for layer in before:
        rows = zip(before[layer].tolist(), after[layer].tolist(), strict=True)
        for expert, (had, has) in enumerate(rows):
            were = [old.names[index] for index in had]
            gained = [new.names[index] for index in has if new.names[index] not in were]
            if not gained:
                continue
            kept = {new.names[index] for index in has}
            leaving = [name for name in were if name not in kept]
            # More owners than before: what no leaving owner hands over comes from the first one.
            sources = leaving + [were[0]] * (len(gained) - len(leaving))
            for source, target in zip(sources, gained, strict=False):
                yield Move(layer, expert, source, target)


def _copies(roster: Roster, table: Mapping[int, Indices]) -> defaultdict[str, Counter[int]]:
    """How many copies each node owns, by layer."""
    copies: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for layer, rows in table.items():
        for index, count in Counter(rows.ravel().tolist()).items():
            copies[roster.names[index]][layer] = count
    return copies

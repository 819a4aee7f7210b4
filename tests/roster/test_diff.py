from __future__ import annotations

from collections import Counter, defaultdict

from hypothesis import given

from expert_roster.diff import Move, NodeBytes, NodeChange, diff
from expert_roster.rendezvous import partition
from expert_roster.roster import Roster
from tests.roster import twin
from tests.roster.strategies import SHAPE, rosters

BLOCKS = sum(experts for _, experts in SHAPE)


@given(rosters(), rosters())
def test_every_gained_copy_is_a_move(old: Roster, new: Roster) -> None:
    """The moves are exactly the blocks that an owner after the change did not own before it."""
    gained = {
        (layer, expert, name)
        for layer, experts in SHAPE
        for expert in range(experts)
        for name in set(twin.owner_order(new, layer, expert)[: new.replicas])
        - set(twin.owner_order(old, layer, expert)[: old.replicas])
    }
    result = diff(old, new, SHAPE)
    assert {(move.layer, move.expert, move.target) for move in result.moves} == gained
    assert result.moved == len(gained)
    assert result.kept + result.moved == result.total == BLOCKS * new.replicas


@given(rosters(), rosters())
def test_sources_owned_the_block_before(old: Roster, new: Roster) -> None:
    """Owners that leave a block hand over its copies; what is left comes from its first owner."""
    sources = defaultdict[tuple[int, int], list[str]](list)
    for move in diff(old, new, SHAPE).moves:
        sources[move.layer, move.expert].append(move.source)
    for block, named in sources.items():
        before = twin.owner_order(old, *block)[: old.replicas]
        after = twin.owner_order(new, *block)[: new.replicas]
        leaving = [name for name in before if name not in after]
        assert named[: len(leaving)] == leaving[: len(named)]
        assert set(named[len(leaving) :]) <= {before[0]}


@given(rosters(), rosters())
def test_counts_per_node(old: Roster, new: Roster) -> None:
    """Every node of either roster is listed once, with the sizes of its two partitions."""
    result = diff(old, new, SHAPE)
    assert [node.name for node in result.nodes] == sorted({*old.names, *new.names})
    for node in result.nodes:
        for roster, count in ((old, node.before), (new, node.after)):
            owned = partition(roster, node.name, SHAPE) if node.name in roster.names else {}
            assert count == sum(len(ids) for ids in owned.values())
    assert Counter({node.name: node.fetched for node in result.nodes}) == Counter(
        move.target for move in result.moves
    )


@given(rosters())
def test_nothing_moves_between_equal_rosters(roster: Roster) -> None:
    """A roster against itself moves nothing, whatever the epoch."""
    later = Roster(roster.nodes, roster.replicas, epoch=7)
    assert diff(roster, later, SHAPE).moves == ()


def test_a_new_node_only_receives() -> None:
    """When c joins a and b, every move goes to c, from its block's former owner."""
    result = diff(Roster.parse("a,b"), Roster.parse("a,b,c"), SHAPE)
    assert {target for _, target in result.pairs} == {"c"}
    assert result.nodes[2] == NodeChange("c", before=0, after=result.moved, fetched=result.moved)
    assert sum(result.pairs.values()) == result.moved > 0


def test_raising_replicas_copies_from_the_first_owner() -> None:
    """With one replica more, each block is copied once, from the owner it had."""
    result = diff(Roster.parse("a,b"), Roster.parse("a,b", replicas=2), [(0, 8)])
    assert (result.total, result.kept, result.moved) == (16, 8, 8)
    assert all({move.source, move.target} == {"a", "b"} for move in result.moves)


def test_lowering_replicas_moves_nothing() -> None:
    """With one replica less, copies are dropped and none is fetched."""
    result = diff(Roster.parse("a,b", replicas=2), Roster.parse("a,b"), [(0, 8)])
    assert (result.total, result.moved) == (8, 0)


def test_bytes_follow_the_layers() -> None:
    """A move weighs what a block of its layer weighs."""
    result = diff(Roster.parse("a"), Roster.parse("b"), [(1, 3), (2, 5)])
    assert result.moves[0] == Move(1, 0, "a", "b")
    assert result.pairs == {("a", "b"): 8}
    assert result.pair_bytes({1: 100, 2: 7}) == {("a", "b"): 335}


@given(rosters(), rosters())
def test_bytes_per_node(old: Roster, new: Roster) -> None:
    """A node gains the bytes of what it owns only after, and loses those of what only before."""
    weighs = {1: 100, 2: 7, 5: 1}

    def owned(roster: Roster, name: str) -> set[tuple[int, int]]:
        blocks = partition(roster, name, SHAPE) if name in roster.names else {}
        return {(layer, expert) for layer, experts in blocks.items() for expert in experts.tolist()}

    result = diff(old, new, SHAPE)
    sizes = result.node_bytes(weighs)
    for node in result.nodes:
        before, after = owned(old, node.name), owned(new, node.name)
        assert node.released == len(before - after)
        assert sizes[node.name] == NodeBytes(
            gained=sum(weighs[layer] for layer, _ in after - before),
            lost=sum(weighs[layer] for layer, _ in before - after),
        )

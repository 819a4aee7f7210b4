from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from expert_network.errors import RosterError
from expert_roster.rendezvous import (
    Indices,
    best_columns,
    block_hashes,
    mix64,
    owner_order,
    owner_table,
    owners,
    partition,
    scores,
)
from expert_roster.roster import Roster
from tests.roster import twin
from tests.roster.strategies import SHAPE, names, rosters, weights

Placement = dict[tuple[int, int], list[str]]


def placement(roster: Roster) -> Placement:
    """Owners' names of every block of SHAPE."""
    return {
        (layer, expert): [roster.names[index] for index in row]
        for layer, table in owner_table(roster, SHAPE).items()
        for expert, row in enumerate(table)
    }


@given(rosters())
def test_owner_order_is_the_twins(roster: Roster) -> None:
    """The vectorised owner order is that of the plain one-by-one formula, for every block."""
    for layer, experts in SHAPE:
        for expert, row in enumerate(owner_order(roster, layer, np.arange(experts))):
            order = [roster.names[index] for index in row]
            assert order == twin.owner_order(roster, layer, expert)


@given(rosters())
def test_owners_are_the_first_of_the_order(roster: Roster) -> None:
    """A block's owners are the first R of its owner order."""
    for (layer, expert), owned_by in placement(roster).items():
        assert owned_by == twin.owner_order(roster, layer, expert)[: roster.replicas]


@given(rosters(min_nodes=2), st.randoms(use_true_random=False))
def test_order_of_names_does_not_matter(roster: Roster, shuffle: random.Random) -> None:
    """Any order of the names gives the same owners and the same digest."""
    nodes = list(roster.nodes)
    shuffle.shuffle(nodes)
    shuffled = Roster(tuple(nodes), roster.replicas, roster.epoch)
    assert shuffled == roster
    assert shuffled.digest == roster.digest
    assert placement(shuffled) == placement(roster)


PRINT_OWNERS = """
import json, sys
from expert_roster.rendezvous import owner_table
from expert_roster.roster import Roster
roster = Roster.parse(sys.argv[1], replicas=2)
table = owner_table(roster, [(0, 64), (7, 64)])
named = {layer: [[roster.names[i] for i in row] for row in rows] for layer, rows in table.items()}
print(json.dumps([roster.digest, named]))
"""


@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_every_process_derives_the_same_owners(seed: str) -> None:
    """Other processes, with other hash seeds and the names turned round, find the same owners."""
    spec = "a=64,b=16,studio.local=192,d"
    turned = ",".join(reversed(spec.split(",")))
    command = [sys.executable, "-c", PRINT_OWNERS, turned]
    env = {**os.environ, "PYTHONHASHSEED": seed}
    printed = subprocess.run(command, env=env, check=True, capture_output=True, timeout=60).stdout
    roster = Roster.parse(spec, replicas=2)
    named = {
        str(layer): [[roster.names[i] for i in row] for row in rows]
        for layer, rows in owner_table(roster, [(0, 64), (7, 64)]).items()
    }
    assert json.loads(printed) == [roster.digest, named]


@given(rosters(), names, weights)
def test_adding_a_node_moves_blocks_only_to_it(roster: Roster, name: str, weight: float) -> None:
    """A new node only pushes itself into owner orders: the others keep theirs, in their order."""
    assume(name not in roster.names)
    grown = replace(roster, nodes=(*roster.nodes, (name, weight)))
    before, after = placement(roster), placement(grown)
    for block, owned_by in after.items():
        if name in owned_by:
            assert [old for old in owned_by if old != name] == before[block][:-1]
        else:
            assert owned_by == before[block]


@given(rosters(min_nodes=2), st.data())
def test_removing_a_node_moves_only_its_blocks(roster: Roster, data: st.DataObject) -> None:
    """A node that leaves hands each of its blocks to the next of the owner order, and no other."""
    name = data.draw(st.sampled_from(roster.names))
    assume(roster.replicas < len(roster.nodes))
    left = replace(roster, nodes=tuple(node for node in roster.nodes if node[0] != name))
    after = placement(left)
    for block, owned_by in placement(roster).items():
        stay = [other for other in twin.owner_order(roster, *block) if other != name]
        assert after[block] == stay[: roster.replicas]
        assert name in owned_by or after[block] == owned_by


@given(rosters(min_nodes=2), st.data(), st.floats(1.5, 8))
def test_a_heavier_node_only_gains(roster: Roster, data: st.DataObject, factor: float) -> None:
    """When a weight rises, blocks move only to that node."""
    name = data.draw(st.sampled_from(roster.names))
    assume(dict(roster.nodes)[name] * factor < 1e18)
    heavier = tuple(
        (other, weight * factor if other == name else weight) for other, weight in roster.nodes
    )
    before, after = placement(roster), placement(replace(roster, nodes=heavier))
    for block, owned_by in after.items():
        assert set(owned_by) - {name} <= set(before[block])
        assert name in owned_by or owned_by == before[block]


@given(rosters(min_nodes=2))
def test_more_replicas_only_add_owners(roster: Roster) -> None:
    """The owners under R are the first R of those under more replicas."""
    most = placement(replace(roster, replicas=len(roster.nodes)))
    for block, owned_by in placement(roster).items():
        assert owned_by == most[block][: roster.replicas]


@given(rosters())
def test_partitions_cover_every_block(roster: Roster) -> None:
    """The partitions of all nodes together hold each block exactly R times."""
    held: dict[tuple[int, int], int] = {}
    for name in roster.names:
        blocks = partition(roster, name, SHAPE)
        assert list(blocks) == [layer for layer, _ in SHAPE]
        for layer, ids in blocks.items():
            assert ids.tolist() == sorted(set(ids.tolist()))
            for expert in ids.tolist():
                held[layer, expert] = held.get((layer, expert), 0) + 1
    assert held == {
        (layer, expert): roster.replicas for layer, experts in SHAPE for expert in range(experts)
    }


def test_a_node_may_own_nothing() -> None:
    """A node whose weight is next to nothing gets an empty partition, with every layer in it."""
    blocks = partition(Roster.parse("a=1000,b=1e-9"), "b", SHAPE)
    assert {layer: ids.tolist() for layer, ids in blocks.items()} == {1: [], 2: [], 5: []}


def test_partition_of_a_stranger_is_refused() -> None:
    """A name that is not in the roster has no partition, and the sentence lists those that are."""
    with pytest.raises(RosterError, match=r"'c' is not in the roster, which names a, b"):
        partition(Roster.parse("a,b"), "c", SHAPE)


def random_roster(seed: int, nodes: int) -> Roster:
    """Names and weights from 1 to 16 by a fixed seed."""
    rng = random.Random(seed)
    return Roster(
        tuple((f"node-{rng.getrandbits(32):x}", rng.uniform(1, 16)) for _ in range(nodes))
    )


LAYERS, EXPERTS = np.divmod(np.arange(24_576), 512)


def within_six_errors(count: int, blocks: int, share: float) -> bool:
    """A binomial count no further from its mean than six standard errors."""
    return bool(abs(count - blocks * share) <= 6 * (blocks * share * (1 - share)) ** 0.5)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("nodes", [2, 5, 30, 200])
def test_shares_follow_the_weights(seed: int, nodes: int) -> None:
    """Every node's part of 24,576 blocks lies within six standard errors of its weight's share."""
    roster = random_roster(seed, nodes)
    counts = np.bincount(owners(roster, LAYERS, EXPERTS).ravel(), minlength=nodes)
    shares = roster.weights / roster.weights.sum()
    checked = [
        within_six_errors(count, len(LAYERS), share)
        for count, share in zip(counts.tolist(), shares.tolist(), strict=True)
        if len(LAYERS) * share >= 20
    ]
    assert len(checked) > nodes // 2
    assert all(checked)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("nodes", [1, 2, 5, 30, 200])
def test_a_new_node_takes_its_share(seed: int, nodes: int) -> None:
    """A node of weight w that joins takes w / (sum of weights) of the blocks, within six errors."""
    old = random_roster(seed, nodes)
    new = replace(old, nodes=(*old.nodes, ("newcomer", 8.0)))
    taken = int((owners(new, LAYERS, EXPERTS) == new.index("newcomer")).sum())
    assert within_six_errors(taken, len(LAYERS), 8.0 / float(new.weights.sum()))


def test_names_that_look_alike_share_evenly() -> None:
    """Hundreds of numbered names, one layer: no pattern in names or experts shows in the shares."""
    roster = Roster(tuple((f"node{number}", 1.0) for number in range(300)))
    table = owners(roster, np.full(65_536, 3), np.arange(65_536))
    counts = np.bincount(table.ravel(), minlength=300)
    assert all(within_six_errors(count, 65_536, 1 / 300) for count in counts.tolist())


@pytest.mark.parametrize("bits", [0, 1, 2**12, 2**63, 2**64 - 2**12, 2**64 - 1])
def test_scores_stay_finite_at_both_ends(bits: int) -> None:
    """Whatever 64 bits the mixer gives, h lies strictly between 0 and 1: a finite score above 0."""
    source = twin.unmix(bits)
    assert twin.mix(source) == bits
    name, block = np.array([source], np.uint64), np.zeros(1, np.uint64)
    assert int(mix64(name)[0]) == bits
    for weight in (1e-9, 1.0, 1e18):
        (value,) = scores(name, np.array([weight]), block)[0]
        assert 0 < value < np.inf


@given(
    st.integers(1, 30).flatmap(
        lambda columns: st.tuples(
            st.lists(
                st.lists(st.integers(1, 4), min_size=columns, max_size=columns),
                min_size=1,
                max_size=4,
            ),
            st.integers(1, columns),
        )
    )
)
def test_ties_go_to_the_lower_column(case: tuple[list[list[int]], int]) -> None:
    """Equal scores are ranked by column, that is by name, whichever way the ranking is done."""
    table, count = case
    best: Indices = best_columns(np.array(table, np.float64), count)
    for row, ranked in zip(table, best.tolist(), strict=True):
        assert ranked == sorted(range(len(row)), key=lambda column: (-row[column], column))[:count]


def test_blocks_beyond_16_bits_are_refused() -> None:
    """A layer or expert that would run into the other's bits is an error, not another block."""
    for layers, experts in (([65_536], [0]), ([0], [65_536]), ([-1], [0]), ([0], [-1])):
        with pytest.raises(RosterError, match="between 0 and 65535"):
            block_hashes(np.array(layers), np.array(experts))


def test_no_blocks_have_no_owners() -> None:
    """Empty input gives empty tables of the right width."""
    none = np.array([], np.int64)
    roster = Roster.parse("a,b,c", replicas=2)
    assert owners(roster, none, none).shape == (0, 2)
    assert owner_order(roster, 0, none).shape == (0, 3)

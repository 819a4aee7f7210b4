"""Each way in which nodes can fail to fit together is one sentence that says what to do."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from expert_driver.dispatch.agreement import Agreement, Greeting, Wanted, agree
from expert_network.errors import NetworkMismatch
from expert_protocol.dtypes import WireDType
from expert_protocol.greetings import Welcome
from expert_protocol.header import VERSION
from expert_roster.rendezvous import owner_order
from expert_roster.roster import Roster

SHAPE = [(0, 8), (3, 8)]
WANTED = Wanted("a" * 64, SHAPE, "float32", False, WireDType.BF16, 100)
EXACT = replace(WANTED, exact=True, wire=WireDType.F32)


def node(
    name: str, spec: str = "a,b,c", url: str = "", replicas: int = 1, **changes: Any
) -> Greeting:
    whole = Roster.parse(spec, replicas)
    welcome = Welcome(
        protocol=VERSION,
        node=name,
        model_digest="a" * 64,
        roster=whole.to_wire(),
        roster_digest=whole.digest,
        epoch=0,
        numerics="mlx-cpu/switch/float32/avx2",
        compute_dtype="float32",
        dtypes=tuple(WireDType),
    )
    return Greeting(url or f"http://{name}:8301", replace(welcome, **changes))


def refusal(*nodes: Greeting, wanted: Wanted = WANTED) -> str:
    with pytest.raises(NetworkMismatch) as caught:
        agree(nodes, wanted)
    sentence = str(caught.value)
    assert sentence.endswith(".") and "\n" not in sentence
    return sentence


@pytest.mark.parametrize("order", list(permutations("abc")))
def test_the_order_of_the_nodes_does_not_matter(order: tuple[str, ...]) -> None:
    """Nodes stand in the order of their roster, whatever order they were given in."""
    agreement = agree([node(name) for name in order], WANTED)
    assert [greeting.name for greeting in agreement.nodes] == ["a", "b", "c"]
    for layer, experts in SHAPE:
        first = owner_order(agreement.roster, layer, np.arange(experts))[:, 0]
        assert agreement.chosen[layer].tolist() == first.tolist()


def test_a_replica_stands_in_for_a_node_that_is_not_there() -> None:
    """With two replicas, one node of the roster may be left out: the next owner is chosen."""
    given = [node(name, replicas=2) for name in "ac"]
    agreement: Agreement = agree(given, WANTED)
    for layer, experts in SHAPE:
        order = owner_order(agreement.roster, layer, np.arange(experts)).tolist()
        expected = [0 if next(i for i in row if i != 1) == 0 else 1 for row in order]
        assert agreement.chosen[layer].tolist() == expected


def test_the_highest_epoch_is_used() -> None:
    """Nodes that differ in nothing but the epoch work together under the latest."""
    later = replace(Roster.parse("a,b"), epoch=4)
    agreement = agree([node("a", "a,b"), node("b", "a,b", roster=later.to_wire(), epoch=4)], WANTED)
    assert agreement.roster.epoch == 4


def begun(name: str, spec: str, epoch: int) -> Greeting:
    """A node that serves a roster that was set."""
    later = replace(Roster.parse(spec), epoch=epoch)
    wire, digest = later.to_wire(), later.digest
    return node(name, roster=wire, roster_digest=digest, epoch=epoch)


def test_the_latest_roster_counts() -> None:
    """While nodes flip, and when one is late, all are asked as nodes of the latest roster."""
    agreement = agree([begun("a", "a,b", 1), begun("b", "a=2,b", 2)], WANTED)
    assert agreement.roster == replace(Roster.parse("a=2,b"), epoch=2)
    assert [greeting.name for greeting in agreement.nodes] == ["a", "b"]


def test_a_node_that_has_left_is_not_asked() -> None:
    """A node that still answers and is not in the latest roster has no part in it."""
    for left in (begun("c", "a,b", 3), begun("c", "a,b,c", 2)):
        agreement = agree([left, begun("a", "a,b", 3), begun("b", "a,b", 3)], WANTED)
        assert [greeting.name for greeting in agreement.nodes] == ["a", "b"]


def test_two_rosters_of_one_epoch() -> None:
    """Rosters that differ under one epoch are nobody's to choose from, whatever the epoch."""
    assert "a=2,b=1" in refusal(begun("a", "a,b", 2), begun("b", "a=2,b", 2))


def test_a_block_that_nobody_owns() -> None:
    """A block no given node owns is named, with its owner and how many there are."""
    sentence = refusal(node("a"), node("b"))
    table = {
        layer: owner_order(Roster.parse("a,b,c"), layer, np.arange(n))[:, 0] for layer, n in SHAPE
    }
    missing = [
        (layer, e) for layer, row in table.items() for e in np.flatnonzero(row == 2).tolist()
    ]
    assert f"owns block {missing[0]}, which is c's" in sentence
    assert f"{len(missing)} of 16 blocks" in sentence and f"c: {len(missing)}" in sentence


def test_two_nodes_with_one_name() -> None:
    """Two addresses of one node, or two nodes of one name, are told apart from the rest."""
    sentence = refusal(node("a", url="http://x:1"), node("b"), node("a", url="http://y:2"))
    assert "http://x:1 and http://y:2 are both node a" in sentence


def test_different_rosters() -> None:
    """The node that differs from the most is named, with both rosters."""
    sentence = refusal(node("a"), node("b", "a,b=2"), node("c"))
    assert "node b (http://b:8301) has the roster a=1,b=2" in sentence
    assert "the roster a,b,c" in sentence and "same --roster" in sentence


def test_different_replicas_are_different_rosters() -> None:
    """A roster with other replicas is another roster, and the sentence shows why."""
    assert "a,b,c with 2 replicas" in refusal(node("a"), node("b", replicas=2), node("c"))


def test_a_node_outside_its_own_roster() -> None:
    """A node that its roster does not name is refused."""
    assert "not in its own roster a,b" in refusal(node("z", "a,b"))


def test_another_model() -> None:
    """A node with another model than the store is named with both digests."""
    sentence = refusal(node("a"), node("b", model_digest="b" * 64), node("c"))
    assert "node b (http://b:8301) has another model (bbbbbbbbbbbb)" in sentence
    assert "aaaaaaaaaaaa" in sentence
    every = refusal(*(node(name, model_digest="b" * 64) for name in "abc"))
    assert "leave STORE out" in every


def test_another_protocol_version() -> None:
    """Both versions are named."""
    assert "version 1 and this driver version 3" in refusal(node("a", "a", protocol=1))


def test_a_wire_dtype_that_a_node_does_not_take() -> None:
    """The dtypes that the node does take are listed."""
    assert "(f32, f16)" in refusal(node("a", "a", dtypes=(WireDType.F32, WireDType.F16)))


def test_a_limit_below_one_row() -> None:
    """A node that cannot take even one row is refused, with what it takes and what is needed."""
    sentence = refusal(node("a", "a,b"), node("b", "a,b", max_payload=99))
    assert "node b (http://b:8301) takes dispatches of 99 bytes" in sentence
    assert "can need 100" in sentence
    agree([node("a", "a,b"), node("b", "a,b", max_payload=100, max_rows=1)], WANTED)


def test_exact_refuses_mixed_numerics() -> None:
    """In exact mode nodes of several numerics ids are refused, with the list."""
    nodes = [node(name) for name in "ab"] + [node("c", numerics="mlx-metal/x/float32/m4")]
    sentence = refusal(*nodes, wanted=EXACT)
    assert "a: mlx-cpu/switch/float32/avx2" in sentence and "c: mlx-metal/x/float32/m4" in sentence
    assert agree(nodes, WANTED)


def test_exact_refuses_another_compute_dtype() -> None:
    """In exact mode a node that computes in another dtype than the driver is refused."""
    sentence = refusal(node("a", "a", compute_dtype="bfloat16"), wanted=EXACT)
    assert "computes in bfloat16 where this driver computes in float32" in sentence

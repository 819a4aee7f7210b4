"""Stories of a reply that outlives what happens to its nodes."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from expert_driver.chaos.faults import Way
from tests.faults.scene import Scene, scene


@pytest.fixture(scope="module", params=[2, 1], ids=["two copies", "one copy"])
def network(request: pytest.FixtureRequest) -> Iterator[Scene]:
    with scene("a,b,c", replicas=request.param) as it:
        it.generate(60)
        yield it


def test_a_node_is_killed(network: Scene) -> None:
    """roster a b c; generate 60; kill b at layer 5 of token 40: the same tokens."""
    network.at(token=40, layer=5).kill("b")
    network.expect_the_same_tokens()


def test_a_node_is_stopped(network: Scene) -> None:
    """stop c at layer 0 of token 20: the same tokens."""
    network.at(token=20, layer=0).stop("c")
    network.expect_the_same_tokens()


def test_a_node_is_cut_off(network: Scene) -> None:
    """a falls silent at layer 7 of token 3, on all its connections: the same tokens."""
    network.at(token=3, layer=7).half_open("a")
    network.expect_the_same_tokens()


def test_a_bit_is_flipped_each_way(network: Scene) -> None:
    """a bit from a at token 10, one to b at token 30, one in a payload: the same tokens."""
    network.at(token=10, layer=2).corrupt("a", byte=24)
    network.at(token=30, layer=6).corrupt("b", byte=1, way=Way.TO_NODE)
    network.at(token=45, layer=1).corrupt("c", byte=70, bit=7)
    network.expect_the_same_tokens()


def test_two_nodes_are_lost_one_after_the_other(network: Scene) -> None:
    """kill a at token 15; drip from c at token 35: the same tokens."""
    network.at(token=15, layer=4).kill("a")
    network.at(token=35, layer=3).drip("c")
    network.expect_the_same_tokens()


def test_the_prompt_is_read_without_a_node(network: Scene) -> None:
    """kill b while the prompt is read: the same tokens."""
    network.at(token=0, layer=3).kill("b")
    network.expect_the_same_tokens()


def test_connections_end_all_the_time(network: Scene) -> None:
    """cut one of a, b, c at every third token: the same tokens."""
    random = Random(5)
    for token in range(1, 58, 3):
        network.at(token, random.randrange(8)).cut(random.choice("abc"), random.random() < 0.5)
    network.expect_the_same_tokens()

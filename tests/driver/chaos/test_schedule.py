"""Faults are drawn from a seed: all kinds, anywhere, and the same ones again."""

from __future__ import annotations

from itertools import islice
from random import Random

from expert_driver.chaos.faults import Delay, Heal, Planned
from expert_driver.chaos.schedule import KINDS, draw


def drawn(seed: int, count: int) -> list[tuple[str, list[Planned]]]:
    return list(islice(draw(Random(seed), list(KINDS), "abc", (1, 3, 4), 20), count))


def test_a_seed_says_it_all() -> None:
    """One seed gives one schedule, another seed another one."""
    assert drawn(7, 30) == drawn(7, 30)
    assert drawn(7, 30) != drawn(8, 30)


def test_all_kinds_come_in_turns() -> None:
    """Each run of as many rounds as there are kinds has them all."""
    found = [kind for kind, _ in drawn(1, 5 * len(KINDS))]
    for first in range(0, len(found), len(KINDS)):
        assert sorted(found[first : first + len(KINDS)]) == sorted(KINDS)


def test_every_node_layer_and_token_has_its_turn() -> None:
    """Nothing is left out, and nothing else is named."""
    planned = [plan[0] for _, plan in drawn(2, 500)]
    assert {fault.node for fault in planned} == set("abc")
    assert {fault.point.layer for fault in planned} == {1, 3, 4}
    assert {fault.point.token for fault in planned} == set(range(19))


def test_a_delay_ends_a_token_later() -> None:
    """A slow connection is slow for one token, so that a round ends."""
    for kind, plan in drawn(3, 50):
        if kind == "delay":
            first, second = plan
            assert isinstance(first.fault, Delay) and second.fault == Heal()
            assert second.point.token == first.point.token + 1
            assert (second.point.layer, second.node) == (first.point.layer, first.node)
        else:
            assert len(plan) == 1

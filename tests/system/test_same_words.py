"""The demo model says the same over any nodes, in any order.

With EXPERT_TESTS_FULL=1 to the end of each reply, else its first words.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import permutations
from pathlib import Path

import pytest

from expert_driver.config import Sampling
from expert_driver.opening import Session
from tests.driver.programs import DEMO_STORE
from tests.support.nodes import NodeProcess, node_processes
from tests.system.sessions import FULL, roster_of, session

PROMPTS = (Path(__file__).parent / "prompts.txt").read_text().splitlines()
SAMPLING = Sampling(max_tokens=200 if FULL else 16)
ORDERED = PROMPTS[: 5 if FULL else 2]


def words(opening: Session, prompt: str) -> list[int]:
    """The token ids of a greedy reply."""
    assert opening.text is not None
    ids = opening.text.encode_chat([{"role": "user", "content": prompt}])
    return list(opening.engine.generate(ids, opening.engine.context(), SAMPLING))


def replies(nodes: Sequence[NodeProcess], prompts: Sequence[str]) -> list[list[int]]:
    with session(DEMO_STORE, nodes, exact=True, text=True) as opening:
        return [words(opening, prompt) for prompt in prompts]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """What one process says to each of PROMPTS."""
    return replies([], PROMPTS)


@pytest.fixture(scope="module", params=(1, 2, 3, 5))
def nodes(request: pytest.FixtureRequest) -> Iterator[list[NodeProcess]]:
    with node_processes(roster_of(request.param), DEMO_STORE) as started:
        yield started


def test_twenty_prompts(nodes: list[NodeProcess], alone: list[list[int]]) -> None:
    """20 prompts get the token ids of one process over 1, 2, 3 and 5 nodes in exact mode."""
    assert len(PROMPTS) == 20 and all(len(reply) >= 10 for reply in alone)
    assert replies(nodes, PROMPTS) == alone


def test_every_order_of_nodes(nodes: list[NodeProcess], alone: list[list[int]]) -> None:
    """The order of --nodes changes no token: all orders of 2 and 3 nodes, five seeded ones of 5."""
    orders = list(permutations(nodes))
    if len(nodes) == 5:
        orders = random.Random(5).sample(orders, 5)
    for order in orders:
        assert replies(order, ORDERED) == alone[: len(ORDERED)]

"""Scenarios that a seed draws: each fault at each layer, or a few faults anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from expert_driver.chaos.faults import Point
from tests.scenarios.transcript import FAULTS, HARMS, Scenario, Step

ROSTER, LAYERS = ("a", "b", "c"), 8
WHATS = (*HARMS, *FAULTS)
#: Nodes that one reply loses at most, of three: somebody has to be left.
LOST = 2
#: Faults of one reply at most.
MOST = 3


def crossed(
    random: Random, replicas: int, tokens: int, more_s: int, every: bool = False
) -> Iterator[Scenario]:
    """Each fault at each layer, at one token or (`every`) at each but the last."""
    for what in WHATS:
        for layer in range(LAYERS):
            # None at the last token: a node that is not asked there is struck when it is next.
            chosen = range(tokens - 2) if every else [random.randrange(tokens - 2)]
            for token in chosen:
                step = Step(what, random.choice(ROSTER), Point(token, layer))
                yield Scenario(ROSTER, replicas, tokens, (step,), more_s)


def drawn(
    random: Random, replicas: int, tokens: int, more_s: int, count: int
) -> Iterator[Scenario]:
    """`count` replies with one to MOST faults each, in the order in which they strike.

    more_s: for each fault.
    """
    for _ in range(count):
        nodes = random.sample(ROSTER, LOST)
        steps = [
            Step(
                random.choice(WHATS),
                random.choice(nodes),
                Point(random.randrange(tokens - 2), random.randrange(LAYERS)),
            )
            for _ in range(random.randint(1, MOST))
        ]
        steps.sort(key=lambda step: step.point)
        # What has ended a node leaves nothing of it to be struck again.
        kept = [
            step
            for n, step in enumerate(steps)
            if not any(before.node == step.node for before in steps[:n])
        ]
        yield Scenario(ROSTER, replicas, tokens, tuple(kept), more_s * len(kept))

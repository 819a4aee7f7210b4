"""Which faults strike, and where: drawn from a seed, so that a run can be had again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random

from expert_driver.chaos.faults import (
    Corrupt,
    Cut,
    Delay,
    Drip,
    Fault,
    HalfOpen,
    Heal,
    Planned,
    Point,
    Way,
)

DELAY_S = 0.05
#: At that pace not even a reply's header comes within a driver's patience.
DRIP_S = 1.0
#: A frame's header and the first bytes of its payload.
_CORRUPTED = 40

KINDS: dict[str, Callable[[Random], Fault]] = {
    "cut": lambda random: Cut(random.random() < 0.5),
    "delay": lambda random: Delay(DELAY_S, jitter=DELAY_S),
    "drip": lambda random: Drip(DRIP_S, Way.TO_DRIVER),
    "half-open": lambda random: HalfOpen(),
    "corrupt": lambda random: Corrupt(
        random.randrange(_CORRUPTED),
        random.randrange(8),
        random.choice((Way.TO_NODE, Way.TO_DRIVER)),
    ),
}


def draw(
    random: Random, kinds: Sequence[str], nodes: Sequence[str], layers: Sequence[int], tokens: int
) -> Iterator[tuple[str, list[Planned]]]:
    """Without end: a fault's kind, and what is to be planned for one reply of `tokens` tokens.

    All kinds come before one comes again. None strikes at the last token: a node that is not asked
    at a point is struck when it is asked next. A delay ends a token later.
    """
    while True:
        for kind in random.sample(list(kinds), len(kinds)):
            node, fault = random.choice(nodes), KINDS[kind](random)
            point = Point(random.randrange(tokens - 1), random.choice(layers))
            plan = [Planned(fault, point, node)]
            if isinstance(fault, Delay):
                plan.append(Planned(Heal(), Point(point.token + 1, point.layer), node))
            yield kind, plan

"""Scenarios as they are written down:

roster a b c, replicas 2
generate 200
kill b at layer 5 of token 40
expect same tokens, at most 6 s more
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from expert_driver.chaos.faults import Corrupt, Cut, Drip, Fault, HalfOpen, Point, Way

#: Faults of a connection, by their words.
FAULTS: dict[str, Fault] = {
    "reset": Cut(),
    "end": Cut(reset=False),
    "half-open": HalfOpen(),
    "drip": Drip(1.0, Way.TO_DRIVER),
    "corrupt a dispatch to": Corrupt(40, 3, Way.TO_NODE),
    "corrupt a reply of": Corrupt(40, 3, Way.TO_DRIVER),
}
#: Those of a node's process: SIGKILL, SIGTERM and SIGSTOP.
HARMS = {"kill": "kill", "stop": "stop", "freeze": "pause"}

_ROSTER = re.compile(r"roster ([\w ]+), replicas (\d+)")
_GENERATE = re.compile(r"generate (\d+)")
_FAULT = re.compile(rf"({'|'.join([*FAULTS, *HARMS])}) (\w+) at layer (\d+) of token (\d+)")
_EXPECT = re.compile(r"expect same tokens, at most (\d+) s more")


@dataclass(frozen=True)
class Step:
    """That `what`, a word of FAULTS or HARMS, happens to `node` at `point`."""

    what: str
    node: str
    point: Point


@dataclass(frozen=True)
class Scenario:
    """A greedy reply of `tokens` tokens, what happens in it, and how much longer it may take."""

    roster: tuple[str, ...]
    replicas: int
    tokens: int
    steps: tuple[Step, ...]
    more_s: int

    @classmethod
    def parse(cls, text: str) -> Scenario:
        """Read a transcript. Raises ValueError for a line that is none."""
        lines = [line.strip() for line in text.strip().splitlines()]
        roster, generate, *steps, expect = lines
        names, replicas = _match(_ROSTER, roster)
        (tokens,), (more,) = _match(_GENERATE, generate), _match(_EXPECT, expect)
        return cls(
            tuple(names.split()), int(replicas), int(tokens), tuple(map(_step, steps)), int(more)
        )

    def __str__(self) -> str:
        happens = [
            f"{s.what} {s.node} at layer {s.point.layer} of token {s.point.token}"
            for s in self.steps
        ]
        return "\n".join(
            [
                f"roster {' '.join(self.roster)}, replicas {self.replicas}",
                f"generate {self.tokens}",
                *happens,
                f"expect same tokens, at most {self.more_s} s more",
            ]
        )


def _step(line: str) -> Step:
    what, node, layer, token = _match(_FAULT, line)
    return Step(what, node, Point(int(token), int(layer)))


def _match(pattern: re.Pattern[str], line: str) -> tuple[str, ...]:
    found = pattern.fullmatch(line)
    if found is None:
        raise ValueError(f"{line!r} is not like {pattern.pattern!r}")
    return found.groups()

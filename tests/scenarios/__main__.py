"""`python -m tests.scenarios`: each fault at each layer, at a token drawn from the seed.

Three nodes with two owners for each block; with --replicas 1 the next node adopts it from its disk.
Exits with 1 if a reply was not the one without faults, failed, or took more than a deadline longer.
"""

from __future__ import annotations

import argparse
import sys
from random import Random

from expert_driver.chaos.faults import Point
from tests.scenarios.stage import stage
from tests.scenarios.transcript import FAULTS, HARMS, Scenario, Step

ROSTER, LAYERS = ("a", "b", "c"), 8


def main() -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.scenarios", description=__doc__)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1, help="tokens for each fault and layer (1)")
    parser.add_argument("--more", type=int, default=6, help="seconds that a fault may add (6)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random, failures = Random(options.seed), 0
    with stage(ROSTER, options.replicas) as there:
        for what in [*HARMS, *FAULTS]:
            for layer in [*range(LAYERS)] * options.rounds:
                point = Point(random.randrange(options.tokens - 2), layer)
                step = Step(what, random.choice(ROSTER), point)
                scenario = Scenario(ROSTER, options.replicas, options.tokens, (step,), options.more)
                played = there.play(scenario)
                problem = played.problem(scenario)
                failures += problem is not None
                happens = str(scenario).splitlines()[2]
                print(
                    f"{happens:<56} {played.more_s:+6.2f} s  {problem or 'same tokens'}", flush=True
                )
    print(f"{failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m tests.scenarios cross`: each fault at each layer, at a token drawn from the seed.

`--every-token` plays each fault at each layer of each token, which takes days. `… random` plays
replies with one to three faults anywhere, and sees that nothing leaks. Three nodes with two owners
for each block; with --replicas 1 the next node adopts it from its disk. JSON on stdout, what
happens on stderr; exits with 1 if a reply was not the one without faults, failed, or took more than
a deadline longer, or if something leaked.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from random import Random
from statistics import median
from threading import active_count
from typing import Any

import psutil

from tests.scenarios.drawing import ROSTER, crossed, drawn
from tests.scenarios.stage import Stage, stage
from tests.scenarios.transcript import Scenario

#: Replies before the first that counts for leaks: by then all that is kept for good is there.
WARM_UP = 5
#: Threads and descriptors of a moment: a link that is being made, both ends of it.
LEEWAY = 8


def held() -> dict[str, int]:
    """What this process has that could leak."""
    process = psutil.Process()
    return {
        "threads": active_count(),
        "descriptors": process.num_fds(),
        "processes": len(process.children(recursive=True)),
        "rss_mb": process.memory_info().rss >> 20,
    }


def play(there: Stage, scenarios: Iterable[Scenario]) -> tuple[list[dict[str, Any]], Any]:
    """All of them; what became of each, and what was held after the first few."""
    results: list[dict[str, Any]] = []
    first = None
    for scenario in scenarios:
        played = there.play(scenario)
        problem = played.problem(scenario)
        happens = "; ".join(str(scenario).splitlines()[2:-1])
        word = problem or "same tokens"
        print(f"{len(results) + 1:>5}  {played.more_s:+6.2f} s  {word:<12}  {happens}",
              file=sys.stderr, flush=True)  # fmt: skip
        results.append({"happens": happens, "more_s": played.more_s, "problem": problem})
        if len(results) == WARM_UP:
            first = held()
    return results, first


def main() -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.scenarios", description=__doc__)
    parser.add_argument("what", choices=["cross", "random"])
    parser.add_argument("--tokens", type=int, help="of a reply  [cross: 200, random: 60]")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--every-token", action="store_true")
    parser.add_argument("--count", type=int, default=1000, help="of random replies (1000)")
    parser.add_argument("--more", type=int, default=6, help="seconds that a fault may add (6)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random, tokens = Random(options.seed), options.tokens
    if options.what == "cross":
        made = (options.replicas, tokens or 200, options.more)
        scenarios = crossed(random, *made, options.every_token)
    else:
        made = (options.replicas, tokens or 60, options.more)
        scenarios = drawn(random, *made, options.count)
    with stage(ROSTER, options.replicas) as there:
        results, first = play(there, scenarios)
        last = held()
    ended = held()
    failures = [result for result in results if result["problem"]]
    leaked = ended["processes"] > 0 or any(
        first is not None and last[what] > first[what] + LEEWAY
        for what in ("threads", "descriptors")
    )
    report = {
        "format": "expert-network-scenarios",
        "what": options.what,
        "seed": options.seed,
        "replies": len(results),
        "failures": failures,
        "more_s": {
            "median": median(result["more_s"] for result in results),
            "most": max(result["more_s"] for result in results),
        },
        "held": {"first": first, "last": last, "ended": ended},
        "leaked": leaked,
    }
    print(json.dumps(report, indent=1))
    return 1 if failures or leaked else 0


if __name__ == "__main__":
    sys.exit(main())

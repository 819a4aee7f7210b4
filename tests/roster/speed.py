"""How long the owners of a large model take: `python -m tests.roster.speed` prints JSON.

The target is 24,576 blocks among 1,000 nodes in under 2 s.
"""

from __future__ import annotations

import json
import resource
import sys
import time

import numpy as np

from expert_roster.rendezvous import owners
from expert_roster.roster import Roster

BLOCKS, NODES = 24_576, 1_000


def main() -> None:
    """Time the owners with one and two replicas, each with weights from 1 to 7."""
    layers, experts = np.divmod(np.arange(BLOCKS), 512)
    nodes = tuple((f"node-{number}", 1.0 + number % 7) for number in range(NODES))
    seconds = {}
    for replicas in (1, 2):
        roster = Roster(nodes, replicas)
        start = time.perf_counter()
        owners(roster, layers, experts)
        seconds[replicas] = round(time.perf_counter() - start, 3)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak_mb = round(peak / (1e6 if sys.platform == "darwin" else 1e3), 1)
    figures = {"blocks": BLOCKS, "nodes": NODES, "seconds_by_replicas": seconds, "peak_mb": peak_mb}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

"""An expert-node whose compute waits for the test: `python -m tests.support.held_node FIFO ...`.

Each dispatch waits until it has read one byte from FIFO.
"""

from __future__ import annotations

import os
import sys
from typing import Any


def main() -> None:
    """Hold Partition.compute, then be `expert-node` with the rest of the arguments."""
    # Opened for both, so that opening waits for nobody.
    gate = os.open(sys.argv.pop(1), os.O_RDWR)
    from expert_network.backend import detect

    detect()
    from expert_network.experts.partition import Partition
    from expert_node.cli import main as node_main

    compute = Partition.compute

    def held(self: Partition, *args: Any) -> Any:
        os.read(gate, 1)
        return compute(self, *args)

    setattr(Partition, "compute", held)  # noqa: B010 - the type checker would forbid it
    node_main()


if __name__ == "__main__":
    main()

"""Ports that deliver every byte a fixed time after it came, in both directions.

    with delayed(0.005, [node.port, ...]) as ports: ...  # ports of 127.0.0.1, in the same order

The proxy is a process of its own here, so that it takes no interpreter lock of anyone it stands
between.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Event

from expert_driver.chaos.faults import Delay
from expert_driver.chaos.proxy import HOST, FaultProxy


@contextmanager
def delayed(delay_s: float, targets: Sequence[int]) -> Iterator[list[int]]:
    """Ports behind which `targets` answer `delay_s` later each way; the proxy ends with the block.

    A TCP connection is made at once: it is the bytes that take their time.
    """
    command = [sys.executable, "-m", "tests.support.delay_proxy", str(delay_s)]
    process = subprocess.Popen(
        [*command, *map(str, targets)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield [int(port) for port in process.stdout.readline().split()]
    finally:
        process.kill()
        process.communicate()


def main() -> None:
    """The command line of this file: prints its ports once it listens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("delay_s", type=float)
    parser.add_argument("targets", type=int, nargs="+")
    options = parser.parse_args()
    with FaultProxy({str(port): (HOST, port) for port in options.targets}) as proxy:
        for port in options.targets:
            proxy.always(str(port), Delay(options.delay_s))
        print(*proxy.ports, flush=True)
        with suppress(KeyboardInterrupt):
            Event().wait()


if __name__ == "__main__":
    main()

"""`python -m tests.fuzz`: give decoders and a node what no honest peer would send.

Exits with 1 if anything but a parsed or a properly refused input came of it.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from functools import partial

from tests.fuzz.driver import DRIVER, run_driver
from tests.fuzz.live import LIVE, run_live
from tests.fuzz.running import Outcome, run
from tests.fuzz.targets import Target, targets

COUNT = 100_000

_ATHERIS = """
--atheris needs `pip install atheris` (3.0.0 has a wheel for CPython 3.11 on Linux x86-64; there is
none for macOS, so it is not among the tools of development). It takes one decoder, --only NAME, and
goes on until it is stopped or --count is reached.
"""


def main() -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description=__doc__,
        epilog=_ATHERIS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--count", type=int, default=COUNT, help="inputs for each decoder (100,000)"
    )
    parser.add_argument("--live", type=int, default=LIVE, help="inputs for a real node (20,000)")
    parser.add_argument("--driver", type=int, default=DRIVER, help="replies to a driver (5,000)")
    parser.add_argument("--only", action="append", help="just this decoder; may come again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="show the decoders")
    parser.add_argument("--atheris", action="store_true", help="guided by coverage; see below")
    options = parser.parse_args()
    chosen = [t for t in targets() if not options.only or t.name in options.only]
    if options.list:
        print(*(target.name for target in chosen), sep="\n")
        return 0
    if options.atheris:
        if len(chosen) != 1:
            parser.error("--atheris takes one decoder: --only NAME")
        _guided(chosen[0], options.count)
    runs = [partial(run, target, options.count, options.seed) for target in chosen]
    if not options.only:
        runs.append(partial(run_driver, options.driver, options.seed))
        runs.append(partial(run_live, options.live, options.seed))
    return 0 if all([_shown(run()) for run in runs]) else 1


def _shown(outcome: Outcome) -> bool:
    """Print it; whether all is as it should be."""
    print(outcome.line(), flush=True)
    for kind, (data, text) in outcome.failures.items():
        print(f"\n{kind}\ninput: {data!r}\n{text}", flush=True)
    return outcome.sound


def _guided(target: Target, count: int) -> None:
    """Let atheris find the inputs; it ends the process, and at the first failure."""
    import atheris

    def test(data: bytes) -> None:
        with suppress(target.refused):
            target.run(data)

    atheris.instrument_all()
    atheris.Setup([sys.argv[0], f"-atheris_runs={count}"], test)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())

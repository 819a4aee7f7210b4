"""`python -m tests.fuzz`: give decoders, a node and a driver what no honest peer would send.

Exits with 1 if anything but a parsed or a properly refused input came of it.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.fuzz.running import Outcome

_ATHERIS = """
--atheris needs `pip install atheris` (3.0.0 has a wheel for CPython 3.11 on Linux x86-64; on macOS
it must be built with a clang of its own, so it is not among the tools of development). It takes one
decoder, --only NAME, and goes on until --count is reached or the first failure.
"""
_INSTRUMENTED = [
    *("expert_protocol", "expert_roster", "expert_network", "expert_node", "expert_driver"),
    *("json", "tomllib"),
]


def main() -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description=__doc__,
        epilog=_ATHERIS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    number = partial(parser.add_argument, type=int)
    number("--count", default=100_000, help="inputs for each decoder (100,000)")
    number("--live", default=20_000, help="inputs for a real node (20,000)")
    number("--driver", default=5_000, help="replies to a driver (5,000)")
    number("--seed", default=0, help="other inputs (0)")
    parser.add_argument("--only", action="append", help="just this decoder; may come again")
    parser.add_argument("--list", action="store_true", help="show the decoders")
    parser.add_argument("--atheris", action="store_true", help="guided by coverage; see below")
    options = parser.parse_args()
    if not options.atheris:
        return _run(options)
    if options.only is None or len(options.only) != 1:
        parser.error("--atheris takes one decoder: --only NAME")
    _guided(options.only[0], options.count)
    return 0


# What is fuzzed is imported late, since atheris instruments what is imported under its eyes.


def _run(options: argparse.Namespace) -> int:
    from tests.fuzz.driver import run_driver
    from tests.fuzz.live import run_live
    from tests.fuzz.running import run
    from tests.fuzz.targets import targets

    chosen = [t for t in targets() if not options.only or t.name in options.only]
    if options.list:
        print(*(target.name for target in chosen), sep="\n")
        return 0
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


def _guided(name: str, count: int) -> None:
    """Let atheris find the inputs; it ends the process."""
    import atheris

    with atheris.instrument_imports(include=_INSTRUMENTED):
        from tests.fuzz.targets import targets
    target = next(target for target in targets() if target.name == name)

    def test(data: bytes) -> None:
        with suppress(target.refused):
            target.run(data)

    with TemporaryDirectory() as corpus:
        for number, seed in enumerate(target.seeds):
            (Path(corpus) / str(number)).write_bytes(seed)
        atheris.Setup([sys.argv[0], f"-runs={count}", corpus], test)
        atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())

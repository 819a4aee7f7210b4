"""`python -m tests.soak --minutes 30`: replies for a long time, while nodes die and come back.

Prints what driver and nodes took as JSON, and a verdict. Exits with 1 if a reply was wrong or
failed, or if memory, descriptors or threads of a process grow.
"""

from __future__ import annotations

import argparse
import json
import sys

from tests.soak.running import run


def main() -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    report = run(options.minutes, options.seed)
    print(json.dumps(report.as_json(), indent=2))
    for name, series in report.series.items():
        for what, found in series.trends().items():
            unit, divide = ("MB", 1e6) if what == "rss" else ("", 1)
            print(
                f"{name:<16} {what:<12} {found.first / divide:8.1f} -> {found.last / divide:8.1f} "
                f"{unit:<2} {found.per_minute / divide:+8.3f} a minute  "
                f"{'flat' if found.flat else 'GROWS'}",
                file=sys.stderr,
            )
    print(f"verdict: {report.as_json()['verdict']}", file=sys.stderr)
    return 0 if report.sound else 1


if __name__ == "__main__":
    sys.exit(main())

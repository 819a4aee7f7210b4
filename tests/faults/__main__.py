"""Replies under faults, many of them: a table on stderr, JSON on stdout, exit code 1 if one fails.

`python -m tests.faults cross` strikes with each kind of fault at each layer, at a token of 200 that
a seed chooses; `--every-token` at each token too, which takes days. `python -m tests.faults random`
draws one to three faults for each reply.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from threading import active_count
from typing import Any

import psutil

from expert_driver.tables import show as show_table
from expert_network.commandline import progress
from tests.faults.scene import KINDS, Scene, scene

ROSTER = "a,b,c"
LAYERS = range(8)
CROSSED = KINDS[:5]
#: Nodes that one schedule harms at most: with a third one lost there is nobody left.
HARMED = 2


@dataclass(frozen=True)
class Strike:
    """One fault. byte, bit: which is flipped, for "corrupt"."""

    kind: str
    node: str
    token: int
    layer: int
    byte: int
    bit: int


@dataclass(frozen=True)
class Result:
    """What became of one reply; problem: None if it was the same in time."""

    strikes: Sequence[Strike]
    added_s: float
    slowest_s: float
    problem: str | None


def crossed(random: Random, tokens: int, every: bool) -> Iterator[list[Strike]]:
    """Each kind of fault at each layer, at one token or at each."""
    for kind in CROSSED:
        for layer in LAYERS:
            chosen = range(tokens - 1) if every else [random.randrange(tokens - 1)]
            for token in chosen:
                yield [_strike(random, kind, random.choice(ROSTER.split(",")), token, layer)]


def drawn(random: Random, tokens: int, count: int) -> Iterator[list[Strike]]:
    """So many schedules of one to three faults."""
    for _ in range(count):
        nodes = random.sample(ROSTER.split(","), HARMED)
        yield [
            _strike(
                random,
                random.choice(KINDS),
                random.choice(nodes),
                random.randrange(tokens - 1),
                random.choice(LAYERS),
            )
            for _ in range(random.randint(1, 3))
        ]


def _strike(random: Random, kind: str, node: str, token: int, layer: int) -> Strike:
    return Strike(kind, node, token, layer, random.randrange(64), random.randrange(8))


def tried(it: Scene, strikes: Sequence[Strike]) -> Result:
    """One reply with these faults."""
    expected = it.generate(it.tokens)
    for strike in strikes:
        point = it.at(strike.token, strike.layer)
        point.by_name(strike.kind, strike.node, strike.byte, strike.bit)
    problem = None
    try:
        it.expect_the_same_tokens()
    except AssertionError as error:
        problem = str(error) or "failed"
    outcome = it.last
    assert outcome is not None
    return Result(strikes, outcome.seconds - expected.seconds, outcome.slowest, problem)


def held() -> dict[str, int]:
    """What this process holds that could leak."""
    process = psutil.Process()
    return {
        "threads": active_count(),
        "descriptors": process.num_fds(),
        "processes": len(process.children(recursive=True)),
    }


def run(
    schedules: Sequence[Sequence[Strike]], replicas: int, tokens: int, report: Callable[..., None]
) -> dict[str, Any]:
    """All of them, as JSON."""
    results = []
    before = held()
    with scene(ROSTER, replicas) as it:
        it.generate(tokens)
        tried(it, schedules[0])  # whatever is kept for good is there after one
        it.mend()
        during = held()
        for strikes in schedules:
            results.append(tried(it, strikes))
            report(len(results), len(schedules), "faults")
        after = held()
    ended = held()
    return {
        "format": "expert-network-faults",
        "replicas": replicas,
        "tokens": tokens,
        "reply_s": it.generate(tokens).seconds,
        "replies": len(results),
        "failures": sum(result.problem is not None for result in results),
        "held": {"before": before, "first": during, "last": after, "ended": ended},
        "results": [asdict(result) for result in results],
    }


def show(report: dict[str, Any]) -> None:
    """A row for each kind of fault."""
    rows = []
    for kind in KINDS:
        met = [r for r in report["results"] if any(s["kind"] == kind for s in r["strikes"])]
        if met:
            worst = max(result["added_s"] for result in met)
            slowest = max(result["slowest_s"] for result in met)
            failed = sum(result["problem"] is not None for result in met)
            rows.append([kind, str(len(met)), str(failed), f"{worst:.2f} s", f"{slowest:.2f} s"])
    headers = ["fault", "replies", "failed", "most added", "slowest token"]
    show_table(headers, rows, sys.stderr, headers[1:])


def main() -> int:
    """The command line of this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["cross", "random"])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=0, help="200 for cross, else 60")
    parser.add_argument("--count", type=int, default=1000, help="of random schedules")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every-token", action="store_true")
    parser.add_argument("--out", type=Path, help="where the JSON goes  [stdout]")
    options = parser.parse_args()
    random = Random(options.seed)
    tokens = options.tokens or (200 if options.what == "cross" else 60)
    if options.what == "cross":
        schedules = list(crossed(random, tokens, options.every_token))
    else:
        schedules = list(drawn(random, tokens, options.count))
    with progress(counts="replies") as report:
        result = run(schedules, options.replicas, tokens, report)
    show(result)
    text = json.dumps(result, indent=1)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    else:
        print(text)
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())

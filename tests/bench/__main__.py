"""Every measurement for the record, one after the other: `python -m tests.bench`, `make bench`.

Each result is written to OUT/NAME.json as soon as it is there; `python -m tests.bench.document OUT`
puts them into docs/performance.md. Let nothing else run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from expert_driver.bench.conditions import conditions, load
from expert_network.commandline import progress
from tests.bench import fanout, growth, llama, pair, peers
from tests.bench.models import make_store
from tests.bench.shapes import shape_named

PARTS = ("kernels", "dispatch", "peers", "pair", "growth")
FANOUTS = (2, 8)  # nodes

Result = dict[str, Any]


def kernels(options: argparse.Namespace) -> Result:
    """tests/bench/kernels.py on one thread and on all, in a process of its own."""
    threads = sorted({1, options.threads})
    words = ["--threads", *map(str, threads), "--rounds", "10" if options.quick else "40"]
    command = [sys.executable, "-m", "tests.bench.kernels", *words]
    before = conditions()
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    found = before | {"load_after": load()}
    result: Result = json.loads(done.stdout)
    return {"format": "expert-network-kernels", "version": 1, "conditions": found} | result


def dispatch(options: argparse.Namespace) -> Result:
    """Our dispatch against a bare fan-out of the same bytes."""
    before, rounds = conditions(), 100 if options.quick else 500
    runs = [fanout.measure(nodes, rounds=rounds) for nodes in FANOUTS]
    found = before | {"load_after": load()}
    return {"format": "expert-network-dispatch", "version": 1, "conditions": found, "runs": runs}


def against_peers(options: argparse.Namespace, shape: str) -> Result:
    """Everyone in turns; see tests/bench/peers.py."""
    asked, rounds = peers.asked_of(options)
    built = llama.ready(options.dir, options.llama_bin)
    with progress(counts="runs") as report:
        return peers.run(shape_named(shape), options.dir, built, asked, rounds, report)


def paired(options: argparse.Namespace, shape: str) -> Result:
    """See tests/bench/pair.py."""
    rounds = 1 if options.quick else 2 * options.rounds
    with progress() as report:
        store = make_store(shape_named(shape), options.dir, report)
    with progress(counts="rounds") as report:
        return pair.run(shape_named(shape), store, options.threads, rounds, report)


def growing(options: argparse.Namespace, shape: str) -> Result:
    """See tests/bench/growth.py."""
    plan = growth.QUICK if options.quick else growth.Plan()
    plan = replace(plan, threads=options.threads)
    with progress(counts="measurements") as report:
        return growth.run(shape_named(shape), options.dir, plan, report)


def jobs(options: argparse.Namespace) -> dict[str, Callable[[], Result]]:
    """What is to be measured, by the name of its file."""
    first, *_ = options.shapes
    found: dict[str, Callable[[], Result]] = {
        "kernels": partial(kernels, options),
        "dispatch": partial(dispatch, options),
    }
    for shape in options.shapes:
        found[f"peers-{shape}"] = partial(against_peers, options, shape)
    found[f"pair-{first}"] = partial(paired, options, first)
    found[f"growth-{first}"] = partial(growing, options, first)
    return {name: job for name, job in found.items() if name.partition("-")[0] in options.only}


def main() -> None:
    """The command line of this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    peers.add_options(parser)
    parser.add_argument("--shapes", nargs="+", default=["olmoe", "qwen3"])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--out", type=Path, help="default: results in --dir")
    options = parser.parse_args()
    out = options.out or options.dir / "results"
    out.mkdir(parents=True, exist_ok=True)
    for name, job in jobs(options).items():
        llama.say(f"measuring {name}")
        result = job()
        (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        if result["format"] == "expert-network-peers":
            peers.show(result)
        elif result["format"] == "expert-network-growth":
            growth.show(result)
    llama.say(f"results are in {out}; python -m tests.bench.document {out} documents them")


if __name__ == "__main__":
    main()

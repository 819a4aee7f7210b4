"""One process and two nodes in turns, with one driver: `python -m tests.bench.pair [SHAPE]`.

What tests/bench/peers.py compares minutes apart, since everyone there starts anew, is asked here
turn by turn: so the ratio does not hold what a shared machine does in between. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from expert_driver.bench.conditions import conditions, load, usable_cores
from expert_driver.bench.samples import Samples, Series, ratios
from expert_driver.bench.subject import Subject
from expert_driver.config import Computing, NetworkConfig
from expert_driver.opening import opened
from expert_network import places
from expert_network.commandline import progress
from expert_network.progress import Progress
from tests.bench.models import default_dir, make_store
from tests.bench.peers import ONE, TWO
from tests.bench.shapes import shape_named
from tests.support.nodes import node_processes

CONTEXT, TOKENS, PROMPT = 128, 32, 512


def measure(store: Path, threads: int, rounds: int, report: Progress) -> list[Series]:
    """Tokens per second of both, one sample a round; who was first in one is last in the next."""
    computing, home = Computing(threads=threads), places.home(None)
    samples = Samples()
    with node_processes("a,b", store, "--threads", str(threads)) as nodes:
        one = NetworkConfig((), False, None, None, home, computing)
        two = NetworkConfig(tuple(node.url for node in nodes), False, None, None, home, computing)
        with opened(str(store), one, False) as here, opened(str(store), two, False) as there:
            pair = [Subject(ONE, here, one), Subject(TWO, there, two)]
            for number in range(-1, rounds):  # the first one warms up
                for subject in pair[:: 1 if number % 2 else -1]:
                    prompt = PROMPT / subject.prefill(PROMPT, number + 1)
                    subject.prefill(CONTEXT, number + 1)
                    decode = TOKENS / subject.decode(TOKENS, number + 1)
                    if number >= 0:
                        samples.add(f"prefill {PROMPT}", "", "tok/s", subject.variant, prompt)
                        samples.add("decode", "", "tok/s", subject.variant, decode)
                report(number + 2, rounds + 1, "measuring")
    return samples.series


def main() -> None:
    """The command line of this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", nargs="?", default="olmoe")
    parser.add_argument("--dir", type=Path, default=default_dir(), help="for the model")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    before = conditions()
    with progress(counts="rounds") as report:
        store = make_store(shape_named(options.shape), options.dir, report)
        series = measure(store, options.threads, options.rounds, report)
    by_name = {(one.what, one.variant): one for one in series}
    compared = [
        ratios(by_name[what, TWO], by_name[what, ONE]) for what, who in by_name if who == TWO
    ]
    result = {
        "format": "expert-network-pair",
        "version": 1,
        "conditions": before | {"load_after": load()},
        "measurements": [one.as_json() for one in series],
        "ratios": [one.as_json() for one in compared],
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

"""One process and two nodes in turns, with one driver.

What tests/bench/peers.py compares minutes apart, since everyone there starts anew, is asked here
turn by turn: so the ratio does not hold what a shared machine does in between.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from expert_driver.bench.conditions import conditions, load
from expert_driver.bench.samples import Samples, Series, compared
from expert_driver.bench.subject import Subject
from expert_driver.config import Computing, NetworkConfig
from expert_driver.opening import opened
from expert_network import places
from expert_network.progress import Progress
from tests.bench.peers import ONE, TWO
from tests.bench.shapes import Shape
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


def run(shape: Shape, store: Path, threads: int, rounds: int, report: Progress) -> dict[str, Any]:
    """The whole measurement of one shape, as JSON."""
    before = conditions()
    series = measure(store, threads, rounds, report)
    return {
        "format": "expert-network-pair",
        "version": 1,
        "shape": shape.facts(),
        "load": {"context": CONTEXT, "tokens": TOKENS, "threads": threads, "rounds": rounds},
        "conditions": before | {"load_after": load()},
        "measurements": [one.as_json() for one in series],
        "ratios": [one.as_json() for one in compared(series, ONE)],
    }

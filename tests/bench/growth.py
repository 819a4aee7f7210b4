"""How cost grows with nodes, with context, with the rows of a prompt, and with the network's delay.

`python -m tests.bench.growth olmoe` starts nodes on this machine and drives them from this process.
A delay is added on both ways by a proxy. What a token takes is held against a model of three terms
that are each measured on their own: attention + layers x (round trip + slowest node's compute).
Prints JSON; a table goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from expert_driver import tables
from expert_driver.bench.conditions import conditions, load, usable_cores
from expert_driver.bench.dispatches import computing_us, observed, ping_us
from expert_driver.bench.report import number
from expert_driver.bench.samples import Samples
from expert_driver.bench.subject import Subject
from expert_driver.config import Computing, NetworkConfig
from expert_driver.opening import opened
from expert_network.commandline import progress
from expert_network.progress import Progress
from tests.bench.models import default_dir, make_store
from tests.bench.shapes import Shape, shape_named
from tests.support.delay_proxy import delayed
from tests.support.nodes import node_processes

PINGS = 50
#: Every part runs in one order and then in the other, so that a machine that slows down meets all.
ORDERS = (1, -1)


@dataclass(frozen=True)
class Plan:
    """What is varied, one thing at a time, over two nodes and after the first context if not it.

    `delays_ms` are one way. `rounds` of `tokens` tokens are decoded in each of two orders.
    """

    nodes: tuple[int, ...] = (1, 2, 4, 8)
    contexts: tuple[int, ...] = (128, 512, 1024, 2048, 4096)
    rows: tuple[int, ...] = (1, 8, 32, 128, 512)
    delays_ms: tuple[float, ...] = (0.0, 1.0, 5.0)
    tokens: int = 32
    rounds: int = 3
    threads: int = 1

    @property
    def steps(self) -> int:
        """How often something is measured."""
        decoded = len(self.nodes) + len(self.contexts) + len(self.delays_ms)
        return len(ORDERS) * self.rounds * (decoded + len(self.rows))


QUICK = Plan((1, 2), (32, 64), (1, 16), (0.0, 5.0), tokens=8, rounds=1)


@dataclass(frozen=True)
class Token:
    """Means over the tokens of one run, in milliseconds and KB."""

    measured: float
    attention: float
    round_trip: float
    compute: float
    traffic: float
    layers: int

    @property
    def predicted(self) -> float:
        """What the model says."""
        return self.attention + self.layers * (self.round_trip + self.compute)


def decoded(subject: Subject, tokens: int, seed: int) -> Token:
    """Decode after what the subject has read, and take the time apart.

    The round trip is that of PINGs, which carry nothing: packing, the rows' bytes and the gathering
    of replies are what the model leaves out.
    """
    network = subject.session.network
    assert network is not None
    pings, nodes = ping_us(network, PINGS), len(network.links)
    round_trip = max(median(pings[node::nodes]) for node in range(nodes))
    before = network.traffic
    with observed(network) as dispatches:
        seconds = subject.decode(tokens, seed)
    waited = sum(times.done - times.evaluated for times in dispatches)
    return Token(
        measured=seconds / tokens * 1e3,
        attention=(seconds - waited) / tokens * 1e3,
        round_trip=round_trip / 1e3,
        compute=fmean(map(computing_us, dispatches)) / 1e3,
        traffic=(network.traffic - before) / tokens / 1e3,
        layers=len(dispatches) // tokens,
    )


class Growth:
    """The measurements, in `samples`; `advance` is called after each."""

    def __init__(self, store: Path, plan: Plan, advance: Callable[[], None]) -> None:
        self._store, self._plan, self._advance = store, plan, advance
        self.samples = Samples()

    def by_nodes(self, order: int) -> None:
        """Decoding and traffic."""
        for count in self._plan.nodes[::order]:
            with self._nodes(count) as ports, self._subject(ports) as subject:
                self._warm_up(subject)
                for seed in range(self._plan.rounds):
                    subject.prefill(self._plan.contexts[0], seed)
                    self._decode(subject, "nodes", str(count), seed)

    def on_two(self, order: int) -> None:
        """Contexts, rows and delays, over the same two nodes."""
        with self._nodes(2) as ports:
            with self._subject(ports) as subject:
                self._warm_up(subject)
                self._by_context(subject, order)
                self._by_rows(subject, order)
            self.by_delay(ports, order)

    def _by_context(self, subject: Subject, order: int) -> None:
        for context in self._plan.contexts[::order]:
            subject.prefill(context, 0)
            for seed in range(self._plan.rounds):
                self._decode(subject, "context", str(context), seed)

    def _by_rows(self, subject: Subject, order: int) -> None:
        for seed in range(self._plan.rounds):
            for rows in self._plan.rows[::order]:
                seconds = subject.prefill(rows + 1, seed)  # the last one is a pass of its own
                self.samples.add("rows", str(rows), "ms", "measured", seconds * 1e3)
                self._advance()

    def by_delay(self, ports: Sequence[int], order: int) -> None:
        """Delays, over the nodes on these ports."""
        with ExitStack() as stack:
            subjects = {}
            for delay in self._plan.delays_ms:
                near = stack.enter_context(delayed(delay / 1e3, ports)) if delay else ports
                subjects[delay] = stack.enter_context(self._subject(near))
                subjects[delay].prefill(self._plan.contexts[0], 0)
            for seed in range(self._plan.rounds):
                for delay, subject in list(subjects.items())[::order]:
                    self._decode(subject, "delay", f"{delay:g}", seed)

    def _decode(self, subject: Subject, what: str, at: str, seed: int) -> None:
        token = decoded(subject, self._plan.tokens, seed)
        add = self.samples.add
        for name in ("measured", "predicted", "attention", "round_trip", "compute"):
            add(what, at, "ms", name, getattr(token, name))
        add(what, at, "x", "measured / predicted", token.measured / token.predicted)
        add(what, at, "KB", "traffic", token.traffic)
        self._advance()

    def _warm_up(self, subject: Subject) -> None:
        subject.prefill(16, 0)
        subject.decode(4, 0)

    @contextmanager
    def _nodes(self, count: int) -> Iterator[list[int]]:
        """Ports of `count` new nodes, which share the threads."""
        threads = str(max(1, self._plan.threads // count))
        roster = ",".join("abcdefgh"[:count])
        with node_processes(roster, self._store, "--threads", threads) as nodes:
            yield [node.port for node in nodes]

    @contextmanager
    def _subject(self, ports: Sequence[int]) -> Iterator[Subject]:
        """A driver in this process over nodes on these ports."""
        urls = tuple(f"http://127.0.0.1:{port}" for port in ports)
        computing = Computing(threads=self._plan.threads)
        config = NetworkConfig(urls, False, None, None, Path("/nowhere"), computing)
        with opened(str(self._store), config, with_text=False) as session:
            yield Subject("", session, config)


def run(shape: Shape, folder: Path, plan: Plan, report: Progress) -> dict[str, Any]:
    """The whole measurement of one shape, as JSON."""
    store = make_store(shape, folder, report)
    before, done = conditions(), 0

    def advance() -> None:
        nonlocal done
        done += 1
        report(done, plan.steps, "measuring")

    growth = Growth(store, plan, advance)
    for order in ORDERS:
        growth.by_nodes(order)
        growth.on_two(order)
    return {
        "format": "expert-network-growth",
        "version": 1,
        "shape": shape.facts(),
        "plan": asdict(plan),
        "conditions": before | {"load_after": load()},
        "measurements": [series.as_json() for series in growth.samples.series],
    }


def show(result: dict[str, Any]) -> None:
    """A row for each point, on stderr."""
    columns = ("measured", "predicted", "attention", "round_trip", "compute", "traffic")
    points: dict[tuple[str, str], dict[str, str]] = {}
    for one in result["measurements"]:
        points.setdefault((one["what"], one["at"]), {})[one["variant"]] = number(one["median"])
    rows = [
        (*point, *(found.get(column, "") for column in columns)) for point, found in points.items()
    ]
    headers = ("varied", "at", *(f"{name} ms" for name in columns[:-1]), "KB a token")
    tables.show(headers, rows, sys.stderr, headers[2:])


def main() -> None:
    """The command line of this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", nargs="?", default="olmoe")
    parser.add_argument("--dir", type=Path, default=default_dir())
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--quick", action="store_true", help="few points, once each")
    options = parser.parse_args()
    plan = replace(QUICK if options.quick else Plan(), threads=options.threads)
    with progress(counts="measurements") as report:
        result = run(shape_named(options.shape), options.dir, plan, report)
    show(result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

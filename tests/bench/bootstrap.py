"""What fetching a partition from peers costs beside curl: `python -m tests.bench.bootstrap`.

Two real nodes serve a model of random weights. By turns, this process fetches a joining node's
blocks from them as `expert-node --peers` does, and curl fetches the same blocks from the same
nodes into files, whose sha256 are made then. With --faults a third node is killed in the middle,
one node is reached through a connection that flips a bit, and one through a slow one. Prints JSON:
seconds, bytes, and the ratio of the medians (1: as fast as curl and sha256).
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import uvloop

from expert_driver.bench.conditions import conditions, load
from expert_driver.chaos.faults import Corrupt, Throttle
from expert_driver.chaos.proxy import HOST, FaultProxy
from expert_network.commandline import progress
from expert_network.net.swarm import Report, fetch_blocks
from expert_network.progress import Progress, silent
from expert_network.store.reader import Store
from expert_roster.rendezvous import partition
from expert_roster.roster import Roster
from tests.bench.models import default_dir, make_store
from tests.bench.shapes import SHAPES
from tests.support.nodes import node_processes

#: The one that joins gets most of the model, so that the model need not be much larger.
ROSTER, ME = Roster.parse("a,b,c=10"), "c"
#: A joining node's share of the blocks must be this much of the whole.
SHARE = 0.8
PARALLEL = 8  # transfers of curl at a time: as many as the fetch has from two nodes
SLOW = 500_000.0  # bytes a second, of the slow source
FLIP_AT = 20_000_000  # bytes of a connection before the flipped bit
KILL_AT = 0.25  # of the bytes, when the dying source dies

Blocks = list[tuple[int, int]]


def make_model(folder: Path, size: float, shape: str, report: Progress) -> Store:
    """A store whose joining node's partition has `size` bytes at least."""
    whole = SHAPES[shape]
    one = Store.open(make_store(whole.cut(1), folder, report)).manifest.layers[0]
    layers = math.ceil(size / (one.experts * one.block_bytes * SHARE))
    if layers > whole.layers:
        sys.exit(f"{shape} has {whole.layers} layers, and {layers} are needed; give a smaller --gb")
    return Store.open(make_store(whole.cut(layers), folder, report))


def wanted(store: Store) -> Blocks:
    """What the joining node owns."""
    owned = partition(ROSTER, ME, store.manifest.shape)
    return [(layer, expert) for layer, ids in owned.items() for expert in ids.tolist()]


@contextmanager
def joining(store: Store, folder: Path) -> Iterator[Store]:
    """A sparse store without blocks; gone afterwards."""
    with TemporaryDirectory(dir=folder) as place:
        part = Path(place) / "part"
        shutil.copytree(store.path, part, ignore=shutil.ignore_patterns("bin"))
        made = Store.open(part, blocks=False)
        made.make_room()
        yield made


def fetch(store: Store, blocks: Blocks, urls: Sequence[str], report: Progress = silent) -> Report:
    """Fetch as a node does, on the loop that a node has."""
    fetching = fetch_blocks(store, blocks, urls, None, report)
    return asyncio.Runner(loop_factory=uvloop.new_event_loop).run(fetching)


def curl(store: Store, blocks: Blocks, urls: Sequence[str], folder: Path) -> tuple[float, float]:
    """Seconds that curl takes for the blocks, and that their sha256 take after it."""
    with TemporaryDirectory(dir=folder) as place:
        files = [Path(place) / f"{layer}-{expert}" for layer, expert in blocks]
        lines = [
            f'url = "{urls[turn % len(urls)]}/block/{layer}/{expert}"\noutput = "{file}"'
            for turn, ((layer, expert), file) in enumerate(zip(blocks, files, strict=True))
        ]
        (Path(place) / "config").write_text("\n".join(lines))
        words = ["curl", "--silent", "--fail", "--parallel", "--parallel-immediate"]
        words += ["--parallel-max", str(PARALLEL), "--config", f"{place}/config"]
        began = perf_counter()
        subprocess.run(words, check=True, capture_output=True)  # it draws a meter even so
        moved = perf_counter()
        for (layer, expert), file in zip(blocks, files, strict=True):
            with file.open("rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
            assert found == store.manifest.layer(layer).sha256[expert]
        return moved - began, perf_counter() - moved


def measure_speed(store: Store, folder: Path, rounds: int, report: Progress) -> dict[str, Any]:
    """Both by turns; who was first in one round is last in the next. The first round warms up."""
    blocks = wanted(store)
    nbytes = sum(store.manifest.layer(layer).block_bytes for layer, _ in blocks)
    ours, curls, hashes = [], [], []
    with node_processes("a,b", store.path) as nodes:
        urls = [node.url for node in nodes]
        for number in range(rounds + 1):
            for turn in ("ours", "curl") if number % 2 else ("curl", "ours"):
                if turn == "curl":
                    moved, hashed = curl(store, blocks, urls, folder)
                    curls.append(moved)
                    hashes.append(hashed)
                else:
                    with joining(store, folder) as made:
                        ours.append(fetch(made, blocks, urls).seconds)
            report(number + 1, rounds + 1, "measuring")
    beside = [one + two for one, two in zip(curls, hashes, strict=True)][1:]
    return {
        "bytes": nbytes,
        "blocks": len(blocks),
        "seconds": {"fetch": ours[1:], "curl": curls[1:], "sha256": hashes[1:]},
        "bytes_per_second": {
            "fetch": nbytes / median(ours[1:]),
            "curl": nbytes / median(curls[1:]),
            "curl_and_sha256": nbytes / median(beside),
        },
        "ratio": median(beside) / median(ours[1:]),
    }


def measure_faults(store: Store, folder: Path, report: Progress) -> dict[str, Any]:
    """One fetch from two sound nodes, one that flips a bit, a slow one, and one that is killed."""
    blocks = wanted(store)
    block = max(store.manifest.layer(layer).block_bytes for layer, _ in blocks)
    with (
        node_processes("a,b,dying", store.path) as nodes,
        joining(store, folder) as made,
        FaultProxy({name: (HOST, nodes[0].port) for name in ("corrupt", "slow")}) as proxy,
    ):
        dying = nodes[2]
        proxy.always("corrupt", Corrupt(FLIP_AT))
        proxy.always("slow", Throttle(SLOW))

        def seen(done: int, total: int, what: str) -> None:
            if done > KILL_AT * total and dying.process.poll() is None:
                dying.kill()
            report(done, total, what)

        names = {proxy.urls()[name]: name for name in ("corrupt", "slow")}
        names |= {node.url: name for node, name in zip(nodes, ("a", "b", "dying"), strict=True)}
        result = fetch(made, blocks, list(names), seen)
        problems = made.verify(only=_by_layer(blocks))
    left_out = {names[source.url]: source.dropped for source in result.sources if source.dropped}
    return {
        "bytes": result.kept,
        "seconds": result.seconds,
        "complete": result.blocks == len(blocks),
        "correct": problems == [],
        "left_out": left_out,
        "fetched_again_bytes": result.wasted,
        "limit_bytes": block * len(left_out),
    }


def _by_layer(blocks: Blocks) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for layer, expert in blocks:
        found.setdefault(layer, []).append(expert)
    return found


def main() -> None:
    """The command line of this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=2.0, help="size of the partition")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="olmoe")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--faults", action="store_true", help="one fetch with bad sources instead")
    parser.add_argument("--dir", type=Path, default=default_dir(), help="where the model stands")
    options = parser.parse_args()
    with progress() as report:
        store = make_model(options.dir, options.gb * 1e9, options.shape, report)
    before = conditions()
    with progress(counts="bytes" if options.faults else "rounds") as report:
        if options.faults:
            result = measure_faults(store, options.dir, report)
        else:
            result = measure_speed(store, options.dir, options.rounds, report)
    facts = {"format": "expert-network-bootstrap", "version": 1}
    print(json.dumps(facts | {"conditions": before | {"load_after": load()}} | result, indent=2))


if __name__ == "__main__":
    main()

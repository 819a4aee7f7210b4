"""This project against its peers on one model, in turns within one run: `… peers olmoe`.

The same random weights in the same size, 4.5 bits each, go through this project in one process and
over two nodes, through llama.cpp in one process and over two of its RPC servers, and (reading 32
tokens, since it is slow there) through mlx-lm. Prints JSON; a table goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from expert_driver import tables
from expert_driver.bench.conditions import conditions, load, usable_cores
from expert_driver.bench.report import number
from expert_driver.bench.samples import Samples, Series, ratios
from expert_network.commandline import progress
from expert_network.progress import Progress
from tests.bench import llama
from tests.bench.contenders import Contender, LlamaCpp, Load, MlxLm, Ours
from tests.bench.models import default_dir, make_store
from tests.bench.shapes import Shape, shape_named

ONE, TWO, LLAMA, RPC, MLX = "one process", "two nodes", "llama.cpp", "llama.cpp RPC", "mlx-lm"


@dataclass(frozen=True)
class Claim:
    """`who` should be at least so many times as fast as `base`, and better still `goal` times."""

    what: str
    who: str
    base: str
    least: float
    goal: float


PROMPT = "prompt"  # the longest that is read

CLAIMS = (
    Claim("decode", ONE, LLAMA, 1.0, 1.3),
    Claim(PROMPT, ONE, LLAMA, 1.0, 1.3),
    Claim("decode", TWO, ONE, 0.85, 1.0),
    Claim(PROMPT, TWO, ONE, 0.85, 1.0),
    Claim("decode", TWO, RPC, 1.5, 1.5),
    Claim(PROMPT, TWO, RPC, 1.0, 1.0),
    Claim("prefill 32", ONE, MLX, 1.0, 1.0),
)


def contenders(shape: Shape, folder: Path, peers: llama.Llama) -> list[Contender]:
    """Everyone, with the models made; who is compared with whom stands beside them."""
    with progress() as report:
        store = make_store(shape, folder, report)
    model = peers.twin(shape, folder)
    return [
        LlamaCpp(LLAMA, peers, model),
        Ours(ONE, store),
        Ours(TWO, store, nodes=2),
        LlamaCpp(RPC, peers, model, servers=2),
        MlxLm(MLX, shape.name),
    ]


def measure(everyone: Sequence[Contender], load: Load, rounds: int, report: Progress) -> Samples:
    """One sample of each in every round; whoever was first in one round is last in the next."""
    samples, total = Samples(), rounds * len(everyone)
    for number_ in range(rounds):
        turn = everyone if number_ % 2 == 0 else everyone[::-1]
        for place, contender in enumerate(turn):
            for what, rate in contender.sample(load).items():
                samples.add(what, "", "tok/s", contender.name, rate)
            report(number_ * len(everyone) + place + 1, total, "measuring")
    return samples


def claimed(
    series: Sequence[Series], longest: int, claims: Sequence[Claim]
) -> list[dict[str, Any]]:
    """Each claim of which both sides were measured, with the ratios of the rounds."""
    found = {(one.what, one.variant): one for one in series}
    results = []
    for claim in claims:
        what = f"prefill {longest}" if claim.what == PROMPT else claim.what
        one, base = found.get((what, claim.who)), found.get((what, claim.base))
        if one is not None and base is not None:
            ratio = ratios(one, base).as_json()
            results.append(asdict(claim) | {"what": what, "ratio": ratio})
    return results


def run(
    shape: Shape, folder: Path, peers: llama.Llama, asked: Load, rounds: int, report: Progress
) -> dict[str, Any]:
    """The whole measurement of one shape, as JSON."""
    everyone = contenders(shape, folder, peers)
    versions = {"llama.cpp": peers.version()}
    return compare(shape, everyone, CLAIMS, asked, rounds, report, versions)


def compare(
    shape: Shape,
    everyone: Sequence[Contender],
    claims: Sequence[Claim],
    asked: Load,
    rounds: int,
    report: Progress,
    versions: Mapping[str, str],
) -> dict[str, Any]:
    """Measure everyone and look at the claims, as JSON; `versions` are of programs besides ours."""
    before = conditions()
    series = measure(everyone, asked, rounds, report).series
    return {
        "format": "expert-network-peers",
        "version": 1,
        "shape": shape.facts(),
        "load": asdict(asked) | {"rounds": rounds},
        "conditions": before | {"load_after": load(), **versions},
        "measurements": [one.as_json() for one in series],
        "claims": claimed(series, max(asked.prompts), claims),
    }


def show(result: dict[str, Any]) -> None:
    """A table of speeds and one of ratios, on stderr."""
    figures = ("median", "least", "most")
    speeds = [
        (one["what"], one["variant"], *(number(one[name]) for name in figures))
        for one in result["measurements"]
    ]
    tables.show(("measured", "who", "tok/s", "least", "most"), sorted(speeds), sys.stderr, figures)
    claims = [
        (
            *(claim["what"], f"{claim['who']} / {claim['base']}"),
            *(number(claim["ratio"][name]) for name in figures),
            number(claim["least"]),
        )
        for claim in result["claims"]
    ]
    headers = ("measured", "who", "ratio", "least", "most", "wanted")
    tables.show(headers, claims, sys.stderr, headers[2:])


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that all measurements with peers share."""
    parser.add_argument("--dir", type=Path, default=default_dir(), help="for models and builds")
    parser.add_argument("--llama-bin", type=Path, help="a folder with llama.cpp's programs")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one short round, rough")


def asked_of(options: argparse.Namespace) -> tuple[Load, int]:
    """The load and the number of rounds that `add_options`' values ask for."""
    if options.quick:
        return Load(64, 8, (32, 128), options.threads), 1
    return Load(128, 32, (32, 512), options.threads), options.rounds


def main() -> None:
    """The command line of this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", nargs="?", default="olmoe")
    add_options(parser)
    options = parser.parse_args()
    asked, rounds = asked_of(options)
    peers = llama.ready(options.dir, options.llama_bin)
    with progress(counts="runs") as report:
        result = run(shape_named(options.shape), options.dir, peers, asked, rounds, report)
    show(result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

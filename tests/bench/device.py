"""A driver over one node beside mlx-lm alone, on one GPU: `python -m tests.bench.device [SHAPE]`.

Each is a program of its own that starts, warms up, is measured and ends, in turns. It runs on a CPU
too, where it says little. Prints JSON; tables go to stderr.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from expert_driver.bench.conditions import usable_cores
from expert_network.commandline import progress
from expert_network.progress import Progress
from tests.bench.contenders import Contender, Load, MlxLm, Ours
from tests.bench.models import default_dir, make_store
from tests.bench.peers import MLX, Claim, compare, show
from tests.bench.shapes import Shape, shape_named

NODE = "one node"
PROMPTS = (128, 512, 2048)
CLAIMS = (
    Claim("decode", NODE, MLX, 0.3, 0.5),
    *(Claim(f"prefill {rows}", NODE, MLX, 0.6, 1.0) for rows in PROMPTS),
)


def run(shape: Shape, store: Path, asked: Load, rounds: int, report: Progress) -> dict[str, Any]:
    """The whole measurement of one shape, as JSON."""
    everyone: list[Contender] = [
        Ours(NODE, store, nodes=1),
        MlxLm(MLX, shape.name, whole_load=True),
    ]
    return compare(shape, everyone, CLAIMS, asked, rounds, report, {})


def main() -> None:
    """The command line of this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", nargs="?", default="olmoe")
    parser.add_argument("--dir", type=Path, default=default_dir(), help="for the model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", nargs="+", type=int, default=PROMPTS)
    options = parser.parse_args()
    asked = Load(32, 64, tuple(options.prompts), usable_cores())
    shape = shape_named(options.shape)
    with progress() as report:
        store = make_store(shape, options.dir, report)
    with progress(counts="runs") as report:
        result = run(shape, store, asked, options.rounds, report)
    show(result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

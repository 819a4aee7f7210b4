"""What int8 activations cost on the demo's model: error of the logits and perplexity.

python -m tests.driver.precision_report TEXTS.json [COUNT] [STORE]

TEXTS.json and COUNT as in tests.driver.wire_report. The reference is MLX's own float32.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from expert_driver.config import Computing, NetworkConfig
from expert_driver.demo import STORE
from expert_driver.opening import Session, opened
from tests.driver.wire_report import WHOLE, Read, facts, ids_of, read, row

KINDS = {
    "native f32": Computing("f32", "native"),
    "native int8": Computing("int8", "native"),
}


def main(file: str, count: str = "200", store: str = str(STORE)) -> None:
    """Print the table, for whole texts and token by token."""
    texts = json.loads(Path(file).read_text(encoding="utf-8"))[: int(count)]
    with session(store, Computing("f32", "mlx")) as mlx:
        pairs = [ids_of(mlx, text) for text in texts]
        few = pairs[: max(1, len(pairs) // WHOLE)]
        reference = both(mlx, pairs, few)
    print(f"{len(pairs)} texts whole, {len(few)} by token; MLX: {facts(reference, pairs)}")
    print("kernels     logits' error  largest  perplexity  by token  same choice")
    for name, computing in KINDS.items():
        with session(store, computing) as found:
            figures = row(both(found, pairs, few), reference, pairs).split(maxsplit=2)[2]
        print(f"{name:<12} {figures}", flush=True)


@contextmanager
def session(store: str, computing: Computing) -> Iterator[Session]:
    """The model in one process, in sum mode."""
    config = NetworkConfig((), False, None, None, Path("/nowhere"), computing)
    with opened(store, config, with_text=True) as found:
        yield found


def both(
    found: Session, pairs: list[tuple[list[int], int]], few: list[tuple[list[int], int]]
) -> tuple[Read, Read]:
    """Whole texts, and a few of them token by token."""
    return read(found, pairs), read(found, few, by_token=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

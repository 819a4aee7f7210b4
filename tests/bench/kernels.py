"""The native kernels beside what the machine allows: `python -m tests.bench.kernels`, JSON.

An OLMoE layer: hidden 2048, inner 1024, 64 experts, 8 for a row, 4-bit weights in groups of 64.
Decode is one row, each time through other experts, so that weights come from memory: GB/s, and as
a part of the line, which is the same threads reading the same weights and doing nothing. Prefill is
512 rows: GFLOP/s. The kinds take turns; each figure is a median, with the quartiles beside it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np

from expert_network import kernels

HIDDEN, INNER, EXPERTS, EACH, GROUP, ROWS = 2048, 1024, 64, 8, 64, 512
STREAMS = 8
# Reading slower streams than these costs no less: the best of them is the line.
PAIR_BYTES = 3 * HIDDEN * INNER * (4 + 2 * 16 / GROUP) / 8


class Layer:
    """Experts of random bits, and dispatches through them."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.packed = [
            rng.integers(0, 2**32, (EXPERTS, rows, cols // 8), np.uint32)
            for rows, cols in ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
        ]
        self.matrices = [self._matrix(weight, rng) for weight in self.packed]
        self.x = rng.normal(size=(ROWS, HIDDEN)).astype(np.float32)
        self.turn = 0
        routes = [rng.permutation(EXPERTS)[:EACH] for _ in range(ROWS)]
        self.routes = np.array(routes, np.uint32).ravel()

    def _matrix(self, weight: np.ndarray[Any, Any], rng: np.random.Generator) -> kernels.Matrix:
        shape = (*weight.shape[:2], weight.shape[2] * 8 // GROUP)
        scales = rng.uniform(0.5, 1.5, shape).astype(np.float16) / 100
        return kernels.Matrix(
            *(weight, scales, (scales * np.float16(-7.5))),
            mode="affine",
            dtype="float16",
            bits=4,
            group_size=GROUP,
            cols=weight.shape[2] * 8,
        )

    def decode(self, precision: int) -> float:
        """GB/s of one row through the next experts in turn."""
        first = self.turn % (EXPERTS // EACH) * EACH
        self.turn += 1
        slots = np.arange(first, first + EACH, dtype=np.uint32)
        return EACH * PAIR_BYTES / 1e9 / self._time(1, slots, precision)

    def prefill(self, precision: int) -> float:
        """GFLOP/s of many rows through all experts."""
        work = 2 * 3 * HIDDEN * INNER * len(self.routes)
        return work / 1e9 / self._time(ROWS, self.routes, precision)

    def line(self) -> float:
        """GB/s of reading a third of the weights."""
        weight = self.packed[self.turn % 3]
        return weight.nbytes / 1e9 / kernels.read_bandwidth(weight, STREAMS)

    def _time(self, rows: int, slots: np.ndarray[Any, Any], precision: int) -> float:
        out = np.empty((rows, HIDDEN), np.float32)
        offsets = np.arange(0, len(slots) + 1, EACH, dtype=np.uint32)
        weights = np.full(len(slots), 1 / EACH, np.float32)
        start = perf_counter()
        rest: tuple[Any, ...] = (self.x[:rows], offsets, slots, weights, out, precision)
        gate, up, down = self.matrices
        kernels.ffn(gate, up, down, "swiglu", (), *rest)
        return perf_counter() - start


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    return {"median": round(middle, 3), "low": round(low, 3), "high": round(high, 3)}


def taking_turns(kinds: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each kind gives, after one round that does not count."""
    taken = [{name: kind() for name, kind in kinds.items()} for _ in range(rounds + 1)]
    return {name: [round_[name] for round_ in taken[1:]] for name in kinds}


def measure(layer: Layer, threads: int, rounds: int, prefills: int) -> dict[str, Any]:
    """All figures with so many threads."""
    kernels.set_threads(threads)
    kinds: dict[str, Callable[[], float]] = {
        "line": layer.line,
        "int8": lambda: layer.decode(kernels.INT8),
        "f32": lambda: layer.decode(kernels.F32),
    }
    decode = taking_turns(kinds, rounds)
    many: dict[str, Callable[[], float]] = {
        "int8": lambda: layer.prefill(kernels.INT8),
        "f32": lambda: layer.prefill(kernels.F32),
    }
    prefill = taking_turns(many, prefills) if prefills else {}
    line = np.array(decode["line"])
    return {
        "threads": threads,
        "decode_GBps": {name: spread(values) for name, values in decode.items()},
        "of_line": {name: spread(list(decode[name] / line)) for name in ("int8", "f32")},
        "prefill_GFLOPS": {name: spread(values) for name, values in prefill.items()},
    }


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, kernels.threads()])
    parser.add_argument("--rounds", type=int, default=40, help="of decode")
    parser.add_argument("--prefills", type=int, default=3, help="rounds of prefill")
    parser.add_argument("--isa", choices=kernels.isas(), default=kernels.isa())
    options = parser.parse_args()
    kernels.use_isa(options.isa)
    layer = Layer(np.random.default_rng(0))
    results = [measure(layer, n, options.rounds, options.prefills) for n in options.threads]
    print(json.dumps({"isa": options.isa, "results": results}, indent=2))


if __name__ == "__main__":
    main()

"""What leaving MLX for experts elsewhere costs the host: `python -m tests.bench.seam [SHAPE]`.

One process decodes with the trunk of a model alone, in turns: with experts that are a line of
MLX's graph, so that the host waits once a token, and with the driver's own experts over a network
that answers at once, so that rows leave MLX and a sum enters it in each layer. The difference is
the seam's cost. Prints JSON, in microseconds a layer.
"""

from __future__ import annotations

import argparse
import json
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from expert_driver.config import Sampling
from expert_driver.dispatch.dispatcher import NetworkExperts
from expert_driver.engine import Engine
from expert_driver.passes.passes import Passes
from expert_network.backend import detect, start_kernels_at_once
from expert_network.model.seam import Experts, install
from expert_network.transfer import transfer_for
from expert_protocol.dtypes import WireDType
from tests.bench.mlx_lm_alone import ids_of
from tests.bench.models import lazy_model, random_array
from tests.bench.shapes import Shape, shape_named

WARM_UP, TOKENS, CONTEXT = 16, 64, 32


class InGraph:
    """Experts that stay in MLX's graph and use everything that a dispatch takes."""

    def outputs(self, layer: int, x: mx.array, ids: mx.array) -> mx.array:
        return mx.broadcast_to(x[:, None], (*ids.shape, x.shape[-1]))

    def weighted_sum(self, layer: int, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        return x.astype(mx.float32) * weights.sum(axis=-1, keepdims=True)


class Answered(NetworkExperts):
    """The driver's experts over a network that answers each dispatch at once, with its rows."""

    def __init__(self, wire: WireDType, backend: str) -> None:
        network: Any = SimpleNamespace(
            wanted=SimpleNamespace(wire=wire),
            links=(),
            observer=None,
            ready=lambda: None,
            used=lambda *figures: None,
            exchange=SimpleNamespace(abandon=lambda: None),
        )
        super().__init__(network, transfer=transfer_for(backend))

    def _fan_out(self) -> None:
        self._fanned = self._network.links

    def _begin_sum(self, layer: int, hidden: int, rows: Any, experts: Any, scores: Any) -> Any:
        made = np.ones((len(experts), hidden), np.float32)
        return SimpleNamespace(wait=lambda: made, traffic=0, times=tuple)


def engine_of(shape: Shape, experts: Experts) -> Engine:
    """The trunk of `shape` with random weights, and these experts behind its seams."""
    model, _ = lazy_model(shape)
    passes = Passes()
    install(model, passes.attend(experts), "sum")
    arrays: Any = tree_flatten(model.parameters())
    shapes = {name: tuple(array.shape) for name, array in arrays}
    made = [(name, random_array(name, array, shapes)) for name, array in arrays]
    model.update(tree_unflatten(made))
    mx.eval(model.parameters())
    return Engine(model, frozenset(), passes)


def token_us(engine: Engine, shape: Shape, tokens: int) -> float:
    """Median time of a token's pass while `tokens` are decoded."""
    prompt = [int(token) for token in ids_of(shape, CONTEXT)]
    times, before = [], 0.0
    for _ in engine.generate(
        prompt, engine.context(), Sampling(temp=0, max_tokens=tokens, ignore_eos=True)
    ):
        now = perf_counter()
        times.append(1e6 * (now - before))
        before = now
    return median(times[1:])


def measure(shape: Shape, rounds: int) -> dict[str, Any]:
    """Both ways in turns, and the difference of each round: us a layer."""
    backend = detect().name
    wire = WireDType.F32 if backend == "mlx-cpu" else WireDType.BF16
    graph, seam = engine_of(shape, InGraph()), engine_of(shape, Answered(wire, backend))
    for engine in (graph, seam):
        token_us(engine, shape, WARM_UP)
    without, costs = [], []
    for _ in range(rounds):
        without.append(token_us(graph, shape, TOKENS) / shape.layers)
        costs.append(token_us(seam, shape, TOKENS) / shape.layers - without[-1])
    return {
        "unit": "us a layer",
        "backend": backend,
        "shape": shape.name,
        "tokens": TOKENS,
        "context": CONTEXT,
        "without": _spread(without),
        "seam": _spread(costs),
    }


def main() -> None:
    """The command line of this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", nargs="?", default="olmoe")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    start_kernels_at_once()
    print(json.dumps(measure(shape_named(options.shape), options.rounds), indent=1))


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(median(values), 1),
        "least": round(min(values), 1),
        "most": round(max(values), 1),
    }


if __name__ == "__main__":
    main()

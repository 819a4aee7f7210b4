"""mlx-lm by itself, without anything of ours: `… mlx_lm_alone olmoe 32 512 --decode 128 32`.

It reads prompts of so many tokens, and decodes 32 tokens after 128, one step ahead.
"""

from __future__ import annotations

import argparse
import json
import random
from statistics import median
from time import perf_counter
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from expert_network.backend import detect
from tests.bench.models import lazy_model, random_array
from tests.bench.shapes import Shape, shape_named


def model_of(shape: Shape) -> Any:
    """mlx-lm's model with the random weights of our store's kind.

    On a CPU its scales are in float32, the fastest dtype for it there.
    """
    model, _ = lazy_model(shape)
    arrays: Any = tree_flatten(model.parameters())
    shapes = {name: tuple(array.shape) for name, array in arrays}
    made = [(name, random_array(name, array, shapes)) for name, array in arrays]
    model.update(tree_unflatten(made))
    if mx.default_device().type == mx.DeviceType.cpu:
        model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model


def ids_of(shape: Shape, count: int) -> mx.array:
    """Random tokens, the same for the same count."""
    choose = random.Random(count)
    return mx.array([choose.randrange(shape.vocab) for _ in range(count)])


def seconds(model: Any, shape: Shape, rows: int) -> float:
    """To read `rows` random tokens."""
    ids = ids_of(shape, rows)[None]
    started = perf_counter()
    mx.eval(model(ids, cache=make_prompt_cache(model)))
    return perf_counter() - started


def decoding_seconds(model: Any, shape: Shape, context: int, tokens: int) -> float:
    """To decode `tokens` tokens after `context` of them and one more."""
    steps = generate_step(ids_of(shape, context), model, max_tokens=tokens + 1)
    next(steps)
    started = perf_counter()
    for _ in steps:
        pass
    return perf_counter() - started


def main() -> None:
    """The command line of this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape")
    parser.add_argument("rows", nargs="+", type=int)
    parser.add_argument("--decode", nargs=2, type=int, metavar=("CONTEXT", "TOKENS"))
    parser.add_argument("--repeats", type=int, default=1, help="of all; the medians count")
    options = parser.parse_args()
    detect()
    shape = shape_named(options.shape)
    model = model_of(shape)
    found = {}
    for rows in options.rows:
        seconds(model, shape, rows)  # a warm-up: MLX compiles kernels for what is new to it
        found[f"prefill {rows}"] = rows / median(
            seconds(model, shape, rows) for _ in range(options.repeats)
        )
    if options.decode:
        context, tokens = options.decode
        decoding_seconds(model, shape, context, 2)
        found["decode"] = tokens / median(
            decoding_seconds(model, shape, context, tokens) for _ in range(options.repeats)
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()

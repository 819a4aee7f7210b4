"""mlx-lm reading a prompt by itself, without anything of ours: `… mlx_lm_alone olmoe 32`."""

from __future__ import annotations

import json
import random
import sys
from time import perf_counter
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache

from expert_network.backend import detect
from tests.bench.models import lazy_model, random_array
from tests.bench.shapes import Shape, shape_named


def model_of(shape: Shape) -> Any:
    """mlx-lm's model with the random weights of our store's kind, its scales in float32."""
    model, _ = lazy_model(shape)
    arrays: Any = tree_flatten(model.parameters())
    shapes = {name: tuple(array.shape) for name, array in arrays}
    made = [(name, random_array(name, array, shapes)) for name, array in arrays]
    model.update(tree_unflatten(made))
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model


def seconds(model: Any, shape: Shape, rows: int) -> float:
    """To read `rows` random tokens."""
    choose = random.Random(rows)
    ids = mx.array([[choose.randrange(shape.vocab) for _ in range(rows)]])
    started = perf_counter()
    mx.eval(model(ids, cache=make_prompt_cache(model)))
    return perf_counter() - started


def main() -> None:
    """The command line of this file."""
    detect()
    shape, rows = shape_named(sys.argv[1]), int(sys.argv[2])
    model = model_of(shape)
    seconds(model, shape, 2)  # a warm-up
    print(json.dumps({"tok_s": rows / seconds(model, shape, rows)}))


if __name__ == "__main__":
    main()

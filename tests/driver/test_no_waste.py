"""What a token costs besides its work: waits for MLX, and memory that Python allocates."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from expert_driver.config import Sampling
from expert_network.model.seam import Mode
from tests.driver.remote import LAYERS, remote
from tests.system.sessions import FULL

TOKENS = 500 if FULL else 40


class Waits:
    """Counts what waits for MLX: an eval, or reading an array that no eval was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._known: list[Any] = []
        evaluate: Any = mx.eval

        def counted(*arrays: Any) -> None:
            self.count += 1
            self._known.extend(_flat(arrays))
            evaluate(*arrays)

        monkeypatch.setattr(mx, "eval", counted)
        for name in ("asarray", "array", "ascontiguousarray"):
            monkeypatch.setattr(np, name, self._reading(getattr(np, name)))

    def _reading(self, read: Any) -> Any:
        def reading(array: Any, *args: Any, **options: Any) -> Any:
            if isinstance(array, mx.array) and not any(array is known for known in self._known):
                self.count += 1
            return read(array, *args, **options)

        return reading


def _flat(arrays: Sequence[Any]) -> Iterator[Any]:
    for array in arrays:
        if isinstance(array, mx.array):
            yield array
        else:
            yield from _flat(array)


@pytest.mark.parametrize("mode", ["sum", "exact"])
def test_a_layer_waits_for_mlx_once(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that is decoded waits once in each MoE layer, and once for the id that is chosen."""
    with remote(mode) as (made, _):
        context, sampler = made.context(), made.sampler(Sampling())
        token = made.step(context, [3], sampler)
        waits = Waits(monkeypatch)
        for _ in range(5):
            token = made.step(context, [token], sampler)
        # The last wait is .item(), which is not counted here.
        assert waits.count == 5 * LAYERS


def test_a_token_leaves_nothing_behind() -> None:
    """Python's memory stays level from token to token, and so does what one token takes.

    Nor is there anything for the garbage collector to find.
    """
    with remote() as (made, _):
        sampling = Sampling(max_tokens=TOKENS + 10)
        tokens = iter(made.generate([3, 5], made.context(), sampling))
        memory(tokens, 10)
        left, garbage, taken = memory(tokens, TOKENS)
    # An id in the context, and a duration for each dispatch among the figures, which keep so many.
    assert left < TOKENS * (40 + LAYERS * 50) + 10_000
    assert garbage == 0
    half = len(taken) // 2
    assert max(taken[half:]) < 1.2 * max(taken[:half])


def memory(tokens: Iterator[int], count: int) -> tuple[int, int, list[int]]:
    """What `count` tokens leave in bytes, circles among that, and the bytes that each took."""
    taken = []
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        for _ in range(count):
            now, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            next(tokens)
            taken.append(tracemalloc.get_traced_memory()[1] - now)
        # This empties the interpreter's lists of spare objects, too.
        garbage = gc.collect()
        return tracemalloc.get_traced_memory()[0], garbage, taken
    finally:
        tracemalloc.stop()
        gc.enable()

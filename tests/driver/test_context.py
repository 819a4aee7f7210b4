"""The KV cache stands for exactly the tokens that the context says it holds."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.base import Module

from expert_driver.context import Context, common_prefix
from expert_driver.engine import Engine
from tests.driver import tiny

IDS = [5, 9, 2, 30, 7, 7, 1, 12]


@pytest.fixture(params=[tiny.qwen, tiny.lfm], ids=["trimmable", "hybrid"])
def model(request: pytest.FixtureRequest) -> Module:
    built: Module = request.param()
    return built


def read(engine: Engine, context: Context, ids: list[int]) -> np.ndarray[Any, Any]:
    """Logits after the last of `ids`, read one by one: the same passes whatever came before."""
    for token in context.reuse(ids):
        logits = engine.model(mx.array([[token]]), cache=context.cache)
        context.extend([token])
    return np.array(logits[0, -1])


def test_common_prefix() -> None:
    """The common prefix ends at the first difference or with the shorter one."""
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 3]) == 2
    assert common_prefix([], [1]) == 0


@pytest.mark.parametrize(
    "before",
    [
        pytest.param(IDS[:4], id="a prefix of the prompt"),
        pytest.param([*IDS[:4], 40, 41], id="a fork"),
        pytest.param([40, 41], id="nothing in common"),
        pytest.param([*IDS, 3, 4], id="more than the prompt"),
        pytest.param(IDS, id="the prompt itself"),
    ],
)
def test_reuse_changes_no_bit(model: Module, before: list[int]) -> None:
    """Whatever the context held, a prompt read into it gives the bits of a fresh context."""
    engine = Engine(model, frozenset())
    context = engine.context()
    read(engine, context, before)
    again = read(engine, context, IDS)
    assert context.tokens == IDS
    assert np.array_equal(again, read(engine, engine.context(), IDS))


def test_a_trimmable_prefix_is_kept() -> None:
    """Where the cache can forget its last tokens, only what differs is read again."""
    engine = Engine(tiny.qwen(), frozenset())
    context = engine.context()
    read(engine, context, [*IDS[:5], 40, 41])
    assert context.reuse(IDS) == IDS[5:]


def test_a_hybrid_fork_starts_afresh() -> None:
    """Where the cache cannot forget, a fork reads the whole prompt and an addition does not."""
    engine = Engine(tiny.lfm(), frozenset())
    context = engine.context()
    read(engine, context, IDS[:5])
    assert context.reuse(IDS) == IDS[5:]
    read(engine, context, [*IDS[:5], 40])
    assert context.reuse(IDS) == IDS


def test_the_last_token_is_always_read() -> None:
    """A prompt that stands in the cache already leaves its last token to read."""
    engine = Engine(tiny.qwen(), frozenset())
    context = engine.context()
    read(engine, context, IDS)
    assert context.reuse(IDS) == IDS[-1:]


class Chunk:
    """A cache entry that remembers its newest tokens only, as a chunked attention's does."""

    def __init__(self) -> None:
        self.offset, self.kept = 0, 3

    def is_trimmable(self) -> bool:
        return True

    def trim(self, count: int) -> int:
        return min(count, self.kept)


def test_a_cache_that_forgets_too_little_starts_afresh() -> None:
    """An entry that cannot go back as far as is asked makes the context read all of it again."""
    context = Context(lambda: [Chunk()])
    context.extend(IDS)
    context.cache[0].offset = len(IDS)
    assert context.reuse([*IDS[:6], 40]) == [40]
    context.cache[0].offset = len(context.tokens)
    assert context.reuse([IDS[0], 40]) == [IDS[0], 40]
    assert context.tokens == []

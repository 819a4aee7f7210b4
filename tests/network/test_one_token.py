"""expert_network.model.one_token"""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.quantized import quantize
from mlx_lm.models import olmoe
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import make_prompt_cache

from expert_network.backend import detect
from expert_network.model import native, one_token
from expert_network.model.seam import Mode, find_switches, install
from expert_network.model.trunk import arrays
from tests.network import families
from tests.network.family_runs import SHORT, OneNode

pytestmark = pytest.mark.skipif(not detect().native, reason="about native kernels")

# What of a layer is known in each: all of it, or all but how experts are chosen.
CHOOSING = ["mellum", "olmoe", "qwen3_moe"]
ATTENDING = ["dots1", "ernie4_5_moe", "mixtral", "qwen2_moe"]
STEPS = [[token] for token in (35, 89, 4, 4, 77, 1, 90, 23)]


class Taken:
    """Counts the tokens that go the short way, and says of whom."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        take = one_token.Way.take

        def counted(*args: Any) -> Any:
            made = take(*args)
            self.count += made is not None
            return made

        monkeypatch.setattr(one_token.Way, "take", counted)


def model_of(family: str, mode: Mode = "sum", precise: bool = True, bits: int = 0) -> Any:
    model: Any = families.build(family)
    if bits:
        quantize(model, 32, bits, class_predicate=lambda path, part: "_proj" in path)
    install(model, OneNode(find_switches(model)), mode)
    mx.eval(list(arrays(model)))
    native.install(model, precise, routers=())
    return model


def steps(model: Any) -> list[Any]:
    """The logits of a prompt and of single tokens after it, through where a cache grows."""
    cache = make_prompt_cache(model)
    return [np.array(model(mx.array([ids]), cache=cache)) for ids in (SHORT, *STEPS)]


def long_way(monkeypatch: pytest.MonkeyPatch, *args: Any) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(one_token, "install", lambda model: None)
        return model_of(*args)


@pytest.mark.parametrize("mode", ["sum", "exact"])
@pytest.mark.parametrize("precise", [True, False])
@pytest.mark.parametrize("family", [*CHOOSING, *ATTENDING])
def test_bits(family: str, precise: bool, mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The short way gives the bits of the long one, in every layer of a family that is known."""
    expected = steps(long_way(monkeypatch, family, mode, precise, 4))
    taken, model = Taken(monkeypatch), model_of(family, mode, precise, 4)
    found = steps(model)
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    ways = [part.way for part in model.modules() if isinstance(part, one_token._Short)]
    # Half of mellum's layers have a window, and a cache that is not plain.
    assert ways and taken.count == len(ways) * len(STEPS) / (1 + (family == "mellum"))
    assert any(way._seam is not None for way in ways) == (family in CHOOSING)


def test_other_families_go_the_long_way() -> None:
    """Code that is not known is left alone, whatever its names."""
    model = model_of("deepseek_v3")
    assert not any(isinstance(part, one_token._Short) for part in model.modules())


def test_what_only_looks_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention whose code is known, but which calls another function by that name, is left."""

    def other(*args: Any, **options: Any) -> Any:
        return 2 * scaled_dot_product_attention(*args, **options)

    monkeypatch.setattr(olmoe, "scaled_dot_product_attention", other)
    model = model_of("olmoe")
    assert not any(isinstance(part, one_token._Short) for part in model.modules())


def test_fingerprints() -> None:
    """Comments, types and docstrings are not in them; names, numbers and order are."""

    def one(self: Any, x: Any) -> Any:
        """Says what it does."""
        return self.a(x) + 1  # and why

    def same(self, x):  # type: ignore[no-untyped-def]
        return self.a(x) + 1

    def another(self: Any, x: Any) -> Any:
        return self.a(x) + 2

    prints = [one_token.fingerprint(f) for f in (one, same, another)]
    # Their own names differ, and are the only difference of the first two.
    words = [" ".join(one_token._words(_body(f))) for f in (one, same, another)]
    assert words[0] == words[1] != words[2]
    assert len(set(prints)) == 3


def _body(function: Any) -> Any:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    cast(Any, tree.body[0]).name = "f"
    return tree

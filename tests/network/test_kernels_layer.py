"""The native trunk layer, step by step beside its parts, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from expert_network import kernels
from expert_network.kernels import ops as typed

if not kernels.available():
    pytest.skip(kernels.reason(), allow_module_level=True)

pytestmark = pytest.mark.usefixtures("isa")

ops: Any = typed  # given wrong arguments too
F = np.float32
HIDDEN, HEADS, KEY_HEADS, DEPTH, EXPERTS, EACH, ROOM = 96, 6, 2, 32, 20, 3, 40
Floats = NDArray[np.float32]
RNG = np.random.default_rng(1)


def normal(*shape: int) -> Floats:
    return RNG.standard_normal(shape).astype(F)


def matrix(rows: int, cols: int, bias: bool = False) -> kernels.Matrix:
    weight = normal(rows, cols) / F(cols**0.5)
    return kernels.Matrix(weight, mode="plain", cols=cols, bias=normal(rows) if bias else None)


BEFORE, AFTER, QUERY_NORM, KEY_NORM = (normal(HIDDEN) for _ in range(4))
QUERY, KEY, VALUE = (matrix(n * DEPTH, HIDDEN, True) for n in (HEADS, KEY_HEADS, KEY_HEADS))
OUTPUT, GATE = matrix(HIDDEN, HEADS * DEPTH), matrix(EXPERTS, HIDDEN)
PLAIN: dict[str, Any] = {
    "before": (BEFORE, 1e-5),
    "after": (AFTER, 1e-6),
    "query": (QUERY, 0),
    "key": (KEY, 0),
    "value": (VALUE, 0),
    "output": (OUTPUT, 0),
    "norms": None,
    "whole": False,
    "heads": HEADS,
    "key_heads": KEY_HEADS,
    "scale": 0.2,
    "rope": (DEPTH, False, 1e4, 1.0),
    "gate": (GATE, 0),
    "each": EACH,
    "ascending": False,
}
OF_HEADS = (normal(DEPTH), 1e-5), (normal(DEPTH), 1e-4)
WHOLE = (normal(HEADS * DEPTH), 1e-5), (normal(KEY_HEADS * DEPTH), 1e-4)


def by_parts(
    row: Floats, caches: list[NDArray[Any]], offset: int, layer: dict[str, Any]
) -> tuple[Floats, ...]:
    """Residual, normed, and the shares of all experts, by one function after the other."""
    x, (dims, traditional, base, scale) = np.empty((1, HIDDEN), F), layer["rope"]
    ops.rms_norm(row.reshape(1, -1), *layer["before"], x)
    made: list[Any] = []
    for name, heads in (("query", HEADS), ("key", KEY_HEADS), ("value", KEY_HEADS)):
        out = np.empty((1, heads * DEPTH), F)
        kernels.linear(layer[name][0], x, out, layer[name][1])
        made.append(out)
    for part, norm in zip(made, layer["norms"] or (), strict=False):
        shaped = part if layer["whole"] else part.reshape(-1, DEPTH)
        ops.rms_norm(shaped, *norm, shaped)
    query, key, value = (part.reshape(1, -1, 1, DEPTH) for part in made)
    for turned in (query, key):
        ops.rope(turned, turned, dims, traditional, base, scale, offset)
    for cache, kept in zip(caches, (key, value), strict=True):
        cache[:, :, offset : offset + 1] = kept
    seen = [cache[:, :, : offset + 1] for cache in caches]
    mixed, attended = np.empty((1, HEADS, 1, DEPTH), F), np.empty((1, HIDDEN), F)
    ops.attention(query, *seen, mixed, layer["scale"])
    kernels.linear(layer["output"][0], mixed.reshape(1, -1), attended, layer["output"][1])
    residual, normed = row + attended[0], np.empty((1, HIDDEN), F)
    ops.rms_norm(residual.reshape(1, -1), *layer["after"], normed)
    shares = np.empty((1, EXPERTS), F)
    kernels.linear(layer["gate"][0], normed, shares, layer["gate"][1])
    ops.softmax(shares, shares)
    return residual, normed[0], shares[0]


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norms": OF_HEADS},
        {"norms": WHOLE, "whole": True},
        {"rope": (20, True, 1e6, 0.5), "ascending": True},
        {"before": (None, 1e-5), "each": EXPERTS, "ascending": True},
    ],
)
def test_the_bits_of_its_parts(changes: dict[str, Any], dtype: Any) -> None:
    """Twelve steps leave the bits, in what goes out and in the cache, of one part after another."""
    layer = PLAIN | changes
    native = ops.trunk_layer(*layer.values())
    caches = [np.zeros((1, KEY_HEADS, ROOM, DEPTH), dtype) for _ in range(2)]
    theirs = [cache.copy() for cache in caches]
    each = layer["each"]
    for offset in range(12):
        row, residual, normed = normal(HIDDEN), np.empty(HIDDEN, F), np.empty(HIDDEN, F)
        experts, shares = np.empty(each, np.uint32), np.empty(each, F)
        assert ops.step(native, row, *caches, offset, residual, normed, experts, shares)
        want, want_normed, all_shares = by_parts(row, theirs, offset, layer)
        np.testing.assert_array_equal(residual, want)
        np.testing.assert_array_equal(normed, want_normed)
        order = np.argsort(all_shares if layer["ascending"] else -all_shares, kind="stable")
        chosen = order[-each:] if layer["ascending"] else order[:each]
        np.testing.assert_array_equal(experts, chosen)
        np.testing.assert_array_equal(shares, all_shares[chosen])
    for cache, other in zip(caches, theirs, strict=True):
        np.testing.assert_array_equal(cache, other)


@pytest.mark.parametrize(("ascending", "first"), [(False, [0, 1, 2]), (True, [17, 18, 19])])
def test_equal_shares(ascending: bool, first: list[int]) -> None:
    """Among equals the first are preferred, or the last, as a stable sort of all has them."""
    gate = kernels.Matrix(np.zeros((EXPERTS, HIDDEN), F), mode="plain", cols=HIDDEN)
    experts = take(PLAIN | {"gate": (gate, 0), "ascending": ascending})[0]
    assert experts.tolist() == first


def take(layer: dict[str, Any], **changes: Any) -> tuple[Any, Any]:
    """The experts and shares of one step, and whether it counts is asserted."""
    given: dict[str, Any] = {
        "row": normal(HIDDEN),
        "keys": np.zeros((1, KEY_HEADS, ROOM, DEPTH), np.float16),
        "values": np.zeros((1, KEY_HEADS, ROOM, DEPTH), np.float16),
        "offset": 3,
        "residual": np.empty(HIDDEN, F),
        "normed": np.empty(HIDDEN, F),
        "experts": np.empty(EACH, np.uint32),
        "shares": np.empty(EACH, F),
    } | changes
    assert ops.step(ops.trunk_layer(*layer.values()), *given.values())
    return given["experts"], given["shares"]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_does_not_count(value: float) -> None:
    """A step whose numbers are not finite says so."""
    row = normal(HIDDEN)
    row[5] = value
    with pytest.raises(AssertionError):
        take(PLAIN, row=row)


def test_what_float16_cannot_hold_does_not_count() -> None:
    """A value of more than 65504 does not go into a float16 cache; a float32 one takes it."""
    value = kernels.Matrix(
        np.full((KEY_HEADS * DEPTH, HIDDEN), 1e6, F), mode="plain", cols=HIDDEN, bias=None
    )
    large = PLAIN | {"value": (value, 0)}
    with pytest.raises(AssertionError):
        take(large, row=np.ones(HIDDEN, F))
    caches = {n: np.zeros((1, KEY_HEADS, ROOM, DEPTH), F) for n in ("keys", "values")}
    take(large, row=np.ones(HIDDEN, F), **caches)


STACK = kernels.Matrix(np.zeros((2, HIDDEN, HIDDEN), F), mode="plain", cols=HIDDEN)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"query": (STACK, 0)}, "query: a stack"),
        ({"query": (QUERY, 2)}, "query: a stack of matrices, or precision"),
        ({"query": QUERY}, "query: not a matrix and its precision"),
        ({"query": (BEFORE, 0)}, "query: not a Matrix"),
        ({"heads": 5}, "heads: "),
        ({"heads": 0}, "heads: "),
        ({"key_heads": -1}, "heads: "),
        ({"key": (QUERY, 0)}, "query, key, value, output: "),
        ({"output": (QUERY, 0)}, "query, key, value, output: "),
        ({"rope": (DEPTH + 2, False, 1e4, 1.0)}, "dims: "),
        ({"rope": (7, False, 1e4, 1.0)}, "dims: "),
        ({"rope": (0, False, 1e4, 1.0)}, "dims: "),
        ({"before": (BEFORE[1:], 1e-5)}, "before: 95 elements, not 96"),
        ({"after": (AFTER.astype(np.float64), 1e-5)}, "after: not of float32"),
        ({"norms": WHOLE}, "norms: query: 192 elements, not 32"),
        ({"norms": OF_HEADS, "whole": True}, "norms: query: 32 elements, not 192"),
        ({"norms": OF_HEADS[:1]}, "norms: neither"),
        ({"gate": (QUERY, 0), "each": 0}, "each: "),
        ({"each": EXPERTS + 1}, "each: "),
        ({"gate": (OUTPUT, 0)}, "gate: not as wide"),
    ],
)
def test_layers_that_do_not_fit_are_refused(changes: dict[str, Any], what: str) -> None:
    """Every wrong shape, count or precision is a ValueError that names the argument."""
    with pytest.raises(ValueError, match=f"^{what}"):
        ops.trunk_layer(*(PLAIN | changes).values())


CACHE = np.zeros((1, KEY_HEADS, ROOM, DEPTH), np.float16)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"row": np.zeros(HIDDEN - 1, F)}, "row: "),
        ({"row": np.zeros(HIDDEN)}, "row: "),
        ({"keys": CACHE[:, :, :3].copy()}, "keys: not a float32 or float16 cache"),
        ({"keys": CACHE.astype(F)}, "values: not a float32 or float16 cache"),
        ({"keys": CACHE.view(np.uint16)}, "keys: not a float32 or float16 cache"),
        ({"values": CACHE[:, :, :20].copy()}, "values: "),
        ({"values": CACHE[:, :1].copy()}, "values: "),
        ({"values": CACHE[0]}, "values: 3 dimensions"),
        ({"offset": ROOM}, "keys: "),
        ({"offset": -1}, "offset: "),
        ({"offset": 1 << 40}, "offset: "),
        ({"residual": np.zeros(HIDDEN + 1, F)}, "residual: "),
        ({"normed": bytes(4 * HIDDEN)}, "normed: "),
        ({"experts": np.zeros(EACH + 1, np.uint32)}, "experts: "),
        ({"experts": np.zeros(EACH, np.int64)}, "experts: "),
        ({"shares": np.zeros(EACH - 1, F)}, "shares: "),
    ],
)
def test_steps_that_do_not_fit_are_refused(changes: dict[str, Any], what: str) -> None:
    """Every wrong size, dtype or place is a ValueError that names the argument."""
    with pytest.raises(ValueError, match=f"^{what}"):
        take(PLAIN, **changes)


def test_only_its_own_layers() -> None:
    """Another object, another capsule included, is not taken for a layer."""
    rest: list[Any] = [normal(HIDDEN), CACHE, CACHE, 0, *(normal(HIDDEN) for _ in range(4))]
    for other in (None, 3, object()):
        with pytest.raises(ValueError):
            ops.step(other, *rest)

from __future__ import annotations

import os
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from expert_network.backend import detect
from expert_network.experts import device_backend, upcast
from expert_network.experts.device_backend import SORTED, DeviceLayer, WideSwitchLinear, widened
from expert_network.experts.layers import EXACT, SUM, MlxLayer
from expert_network.transfer import Transfer, transfer_for
from tests.support.switches import EXPERTS, HIDDEN, KINDS, Kind, array, resident, switch_of

HELD = [1, 2, 5, 6, 7, 11]
BACKEND = detect("mlx")
CPU = BACKEND.name == "mlx-cpu"
AFFINE = Kind("affine", mx.bfloat16, ("affine", 4, 32))

# All kinds in the long form, and on a GPU always, where the path matters.
SOME = KINDS if os.environ.get("EXPERT_TESTS_FULL") or not CPU else [KINDS[3], AFFINE]

# Rows with these numbers of pairs: one row, equal rows, unequal ones, more than mlx-lm sorts.
COUNTS = [[3], [2, 2, 2], [3, 1, 2], [4] * 17, [1, 4, 2, 3] * 7]


def layer(kind: Kind, transfer: Transfer | None = None) -> DeviceLayer:
    held = resident(kind, HELD, in_place=CPU)
    if CPU:
        upcast.adapt([held.switch])
    return DeviceLayer(held, dtype_of(kind), transfer or transfer_for(BACKEND.name))


def dtype_of(kind: Kind) -> mx.Dtype:
    return mx.float32 if CPU else kind.dtype


def assert_near(found: Any, expected: Any) -> None:
    """Alike but for rounding: on a device that of bfloat16, of what stands between products too."""
    if CPU:
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    else:
        assert np.linalg.norm(found - expected) < 0.02 * np.linalg.norm(expected)


def dispatch(counts: list[int]) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    pairs = sum(counts)
    return {
        "rows": rng.standard_normal((len(counts), HIDDEN), dtype=np.float32),
        "offsets": np.cumsum([0, *counts]).astype(np.uint32),
        "ids": rng.choice(HELD, pairs).astype(np.uint16),
        "weights": rng.random(pairs, dtype=np.float32),
        "precise": True,
    }


@pytest.mark.parametrize("counts", COUNTS, ids=lambda counts: f"{len(counts)}x{counts[-1]}")
@pytest.mark.parametrize("kind", SOME, ids=lambda kind: kind.name)
def test_as_one_by_one(kind: Kind, counts: list[int]) -> None:
    """Sums and outputs are those of every pair computed alone."""
    made, asked = layer(kind), dispatch(counts)
    alone = MlxLayer(made._resident, dtype_of(kind))
    row_of_pair = np.repeat(np.arange(len(counts)), counts)
    one, weight = np.array([0, 1], np.uint32), np.ones(1, np.float32)
    each = np.concatenate(
        [
            alone.compute(EXACT, asked["rows"][[row]], one, asked["ids"][[n]], weight, True)
            for n, row in enumerate(row_of_pair)
        ]
    )
    outputs = made.compute(EXACT, **asked)
    assert outputs.dtype == np.float32
    assert_near(outputs, each)
    sums = np.zeros_like(asked["rows"])
    np.add.at(sums, row_of_pair, each * asked["weights"][:, None])
    assert_near(made.compute(SUM, **asked), sums)


@pytest.mark.parametrize("kind", SOME, ids=lambda kind: kind.name)
def test_exact_outputs_are_alike(kind: Kind) -> None:
    """A pair has the same bits alone, among few and among many, sorted or not, held or asked."""
    made, many = layer(kind), dispatch([3] * 30)
    found = made.compute(EXACT, **many)
    for count in (1, 7, 20, 23):
        few = dict(many, rows=many["rows"][:count], offsets=many["offsets"][: count + 1])
        few |= {key: many[key][: 3 * count] for key in ("ids", "weights")}
        assert np.array_equal(made.compute(EXACT, **few), found[: 3 * count])
    ids = mx.array(many["ids"].reshape(30, 3).astype(np.uint32))
    outputs = made.outputs(mx.array(many["rows"]), ids, True)
    assert np.array_equal(array(outputs).reshape(found.shape), found)
    first = made.outputs(mx.array(many["rows"][:1]), ids[:1], True)
    assert np.array_equal(array(first)[0], found[:3])


def test_long_dispatches_go_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too long for one call of the switch module is computed in several, with its bits."""
    whole = layer(AFFINE)
    monkeypatch.setattr(device_backend, "CALL_BYTES", 0)
    parts = layer(AFFINE)
    assert parts._resident.most_pairs == SORTED < whole._resident.most_pairs
    for counts in ([3] * 40, [1, 4, 2, 3] * 12):
        asked = dispatch(counts)
        assert np.array_equal(parts.compute(EXACT, **asked), whole.compute(EXACT, **asked))


def test_one_wait_for_each_dispatch() -> None:
    """However a dispatch is formed, its values go to the device in one step and come in one."""

    class Counting(Transfer):
        calls: tuple[str, ...] = ()

        def fetch(self, *arrays: mx.array) -> Any:
            self.calls += ("fetch",)
            return super().fetch(*arrays)

        def put(self, *values: Any) -> Any:
            self.calls += ("put",)
            return super().put(*values)

    for counts in COUNTS[:3]:
        counting = Counting()
        layer(AFFINE, counting).compute(SUM, **dispatch(counts))
        assert counting.calls == ("put", "fetch")


def test_wide_projections_agree() -> None:
    """With weights cast for many rows, sums come out as they do with quantized ones."""
    if CPU:
        pytest.skip("MLX multiplies half-precision experts on a GPU only")
    narrow, asked = layer(AFFINE), dispatch([4, 1, 3] * 20)
    held = resident(AFFINE, HELD, in_place=False)
    wide = DeviceLayer(held, mx.bfloat16, Transfer(), wide=True)
    assert wide._wide is not None
    ours, theirs = wide.compute(SUM, **asked), narrow.compute(SUM, **asked)
    assert np.linalg.norm(ours - theirs) < 0.01 * np.linalg.norm(theirs)


def test_wide_modules_share_their_arrays() -> None:
    """A module that casts weights keeps none of its own, and leaves the other one as it is."""
    switch = switch_of(AFFINE)
    wide: Any = widened(switch, EXPERTS)
    assert type(wide) is type(switch)
    assert isinstance(wide.up_proj, WideSwitchLinear)
    assert not isinstance(switch.up_proj, WideSwitchLinear)
    assert wide.up_proj.weight is switch.up_proj.weight
    assert wide.activation is switch.activation


@pytest.mark.parametrize("kind", [Kind("plain", mx.bfloat16), KINDS[-4]], ids=lambda k: k.name)
def test_what_is_not_cast(kind: Kind) -> None:
    """Weights that are not quantized, or that have one more scale, stay as they are."""
    assert widened(switch_of(kind), EXPERTS) is None


def test_large_projections_stay_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where cast weights would take too much memory, the quantized ones are used as they lie."""
    monkeypatch.setattr(device_backend, "WIDE_BYTES", 1000)
    assert widened(switch_of(AFFINE), EXPERTS) is None

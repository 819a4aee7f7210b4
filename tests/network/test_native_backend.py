"""expert_network.experts.native_backend and the choice of a partition."""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.activations import GELU, ReLU2, SiLU, Tanh
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from expert_network import kernels
from expert_network.backend import Backend
from expert_network.errors import NotOwned
from expert_network.experts.layers import EXACT, SUM, MlxLayer
from expert_network.experts.native_backend import NativeLayer
from expert_network.experts.partition import Partition, _computing
from expert_network.model.host import HostArray
from tests.support.switches import (
    EXPERTS,
    HIDDEN,
    KINDS,
    Kind,
    array,
    as_float32,
    resident,
    rows,
)

HELD = [1, 2, 5, 6, 7, 11]

_gelu: Any = GELU

#: Stored or activated in a way that only MLX knows.
LEFT_TO_MLX = {"mxfp8", "nvfp4", "nvfp4, global scale", "nemotron"}
NATIVE = [kind for kind in KINDS if kind.name not in LEFT_TO_MLX] + [
    Kind("relu2", mx.bfloat16, ("affine", 4, 32), make=SwitchMLP, activation=ReLU2),
    Kind("silu", mx.bfloat16, make=SwitchMLP, activation=SiLU),
    Kind("gelu", mx.float32, bias=True, make=SwitchMLP, activation=GELU),
    Kind("gelu, tanh", mx.float32, make=SwitchMLP, activation=partial(_gelu, "precise")),
    Kind("gelu, fast", mx.float32, make=SwitchMLP, activation=partial(_gelu, "fast")),
]

pytestmark = pytest.mark.skipif(not kernels.available(), reason=kernels.reason())


@pytest.fixture(params=NATIVE, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


def layer_of(kind: Kind) -> NativeLayer:
    layer = NativeLayer.over(resident(kind, HELD))
    assert layer is not None
    return layer


def routes(count: int, top: int = 3) -> Any:
    """Ids (count, top) of held experts, no two alike in a row."""
    rng = np.random.default_rng(2)
    return np.stack([rng.permutation(HELD)[:top] for _ in range(count)]).astype(np.uint32)


def distance(found: Any, expected: Any) -> float:
    """Relative L2 error."""
    error = np.linalg.norm(np.array(found) - np.array(expected))
    return float(error / np.linalg.norm(np.array(expected)))


def test_outputs_are_mlx_s(kind: Kind) -> None:
    """Precise outputs are within 1e-5 of what MLX makes of the family's own module in float32."""
    x, ids = rows(5), mx.array(routes(5))
    expected = array(as_float32(kind)(x, ids))
    found = layer_of(kind).outputs(x, ids, precise=True)
    assert found.shape == (5, 3, HIDDEN) and found.dtype == mx.float32
    assert distance(found, expected) < 1e-5


def test_int8_is_near(kind: Kind) -> None:
    """Without precision quantized experts round activations, by 3 % in L2; others stay exact."""
    x, ids = rows(20), mx.array(routes(20))
    layer = layer_of(kind)
    precise, rounded = (layer.outputs(x, ids, precise=p) for p in (True, False))
    if kind.quantization is None:
        assert np.array_equal(array(rounded), array(precise))
    else:
        assert 1e-4 < distance(rounded, precise) < 3e-2


@pytest.mark.parametrize("precise", [True, False])
def test_a_dispatch(kind: Kind, precise: bool) -> None:
    """A node answers with the bits of the in-process run: outputs, and their sums in order."""
    layer, x, ids = layer_of(kind), rows(7), routes(7)
    weights = np.random.default_rng(4).random(ids.shape, dtype=np.float32)
    asked = (array(x), np.arange(0, 22, 3, dtype=np.uint32), ids.reshape(-1).astype(np.uint16))
    exact = layer.compute(EXACT, *asked, weights.reshape(-1), precise)
    summed = layer.compute(SUM, *asked, weights.reshape(-1), precise)
    assert np.array_equal(array(layer.outputs(x, mx.array(ids), precise)).reshape(21, -1), exact)
    here = layer.weighted_sum(x, mx.array(ids), mx.array(weights), precise)
    assert np.array_equal(array(here), summed)
    expected = (exact.reshape(7, 3, -1) * weights[..., None]).sum(axis=1)
    np.testing.assert_allclose(summed, expected, rtol=1e-5, atol=1e-5)


def test_a_row_is_alone(kind: Kind) -> None:
    """Precise or not, a row has the same bits whatever rows stand beside it."""
    layer, x, ids = layer_of(kind), rows(12), mx.array(routes(12))
    for precise in (True, False):
        many = array(layer.outputs(x, ids, precise))
        alone = [array(layer.outputs(x[n : n + 1], ids[n : n + 1], precise)) for n in range(12)]
        assert np.array_equal(many, np.concatenate(alone))


def test_one_route() -> None:
    """A single route for each row, taken from an order of all experts, is computed as any other."""
    layer, x, order = layer_of(KINDS[0]), rows(6), HostArray.of(routes(6, 4))
    expected = layer.outputs(x, mx.array(np.array(order)[:, :1]), precise=True)
    assert mx.array_equal(layer.outputs(x, order[:, :1], precise=True), expected)


def test_half_precision_rows() -> None:
    """Rows in bfloat16 are computed in float32, and outputs have the rows' dtype."""
    layer = layer_of(KINDS[1])
    x, ids = rows(2).astype(mx.bfloat16), mx.array(routes(2))
    found = layer.outputs(x, ids, precise=True)
    assert found.dtype == mx.bfloat16
    expected = layer.outputs(x.astype(mx.float32), ids, precise=True).astype(mx.bfloat16)
    assert mx.array_equal(found, expected)


def test_absent_expert() -> None:
    """An expert that is not held is named."""
    layer = layer_of(KINDS[0])
    for expert in (0, EXPERTS + 3):
        with pytest.raises(NotOwned, match=rf"block \(5, {expert}\)"):
            layer.outputs(rows(1), mx.array([[2, expert]]), precise=True)


@pytest.mark.parametrize("kind", [k for k in KINDS if k.name in LEFT_TO_MLX], ids=lambda k: k.name)
def test_what_kernels_do_not_know(kind: Kind) -> None:
    """A format or an activation that only MLX knows is computed by MLX, and that is said."""
    known, other = resident(KINDS[1], HELD), resident(kind, HELD)
    backend = Backend("mlx-cpu", "1", "avx2", native=True)
    layers = _computing([known, other], backend, "bfloat16")
    assert [type(layer) for layer in layers] == [NativeLayer, MlxLayer]
    x, ids = rows(3), mx.array(routes(3))
    assert distance(layers[1].outputs(x, ids, False), as_float32(kind)(x, ids)) < 1e-4
    part = Partition(layers[1:], backend, "bfloat16")
    assert part.kernels == "native avx2, int8 (f32 when asked); layers 5 mlx-cpu"
    assert Partition(layers[:1], backend, "bfloat16").kernels.endswith("(f32 when asked)")


def test_a_subclass_is_not_known() -> None:
    """An activation that only looks like a known one is not taken for it."""

    class Mine(ReLU2):
        pass

    for activation in (Mine, Tanh):
        odd = Kind("odd", mx.float32, make=SwitchMLP, activation=activation)
        assert NativeLayer.over(resident(odd, HELD)) is None


def test_in_place() -> None:
    """The kernels read the very memory that blocks were read into: nothing is copied."""
    held = resident(KINDS[1], HELD)
    layer = NativeLayer.over(held)
    assert layer is not None
    assert isinstance(held.switch, SwitchGLU)
    x, ids = rows(1), mx.array([[HELD[0]]])
    before = array(layer.outputs(x, ids, precise=True)).copy()
    np.asarray(held.switch.down_proj.weight.view(mx.uint16))[0] = 0
    assert before.any() and not array(layer.outputs(x, ids, precise=True)).any()

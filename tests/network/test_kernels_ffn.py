"""The fused experts, against mlx-lm's own modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers import activations
from mlx.utils import tree_map
from mlx_lm.models.activations import SwigluOAI
from mlx_lm.models.deepseek_v41 import DeepseekV41SwiGLU
from mlx_lm.models.gemma4_text import GeGLU
from mlx_lm.models.step3p5 import ClampedSwiGLU
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from expert_network import kernels
from expert_network.backend import detect
from tests.network.kernel_cases import (
    AFFINE,
    MXFP4,
    PLAIN,
    Floats,
    Format,
    error,
    ffn,
    random_weight,
)
from tests.network.test_kernels_linear import isa as isa
from tests.network.test_kernels_linear import two_threads as two_threads

if not kernels.available():
    pytest.skip(kernels.reason(), allow_module_level=True)

detect()  # turns mx.compile off, which takes seconds for each activation

EXPERTS, HIDDEN, INNER = 6, 128, 192
Q4 = Format("affine", "bfloat16", 4, 64)


# They are not typed.
nn: Any = activations
Ungated = Callable[[mx.array], mx.array]


def gated(activation: Ungated) -> Callable[[mx.array, mx.array], mx.array]:
    """An expert layer's activation that mlx-lm has no module for."""
    return lambda x, gate: activation(gate) * x


GATED: dict[str, tuple[tuple[float, ...], Any]] = {
    "swiglu": ((), gated(nn.silu)),
    "swiglu_clipped": ((0.7,), DeepseekV41SwiGLU(0.7)),
    "swiglu_clipped_after": ((0.7,), ClampedSwiGLU(0.7)),
    "gpt_oss": ((1.702, 0.7), SwigluOAI(1.702, 0.7)),
    "geglu_tanh": ((), GeGLU()),
    "geglu_erf": ((), gated(nn.gelu)),
    "geglu_fast": ((), gated(nn.gelu_fast_approx)),
}
UNGATED: dict[str, Ungated] = {
    "relu2": nn.ReLU2(),
    "silu": nn.silu,
    "gelu_tanh": nn.gelu_approx,
    "gelu_erf": nn.gelu,
    "gelu_fast": nn.gelu_fast_approx,
}


def routes(rng: np.random.Generator, rows: int, each: int = 2) -> list[list[int]]:
    """Experts of each row, none twice."""
    return [rng.permutation(EXPERTS)[:each].tolist() for _ in range(rows)]


def stack(layer: Any) -> kernels.Matrix:
    """A switch layer's float32 weights, in place."""
    bias = np.asarray(layer.bias) if "bias" in layer else None
    return kernels.Matrix(
        np.asarray(layer.weight), mode="plain", cols=layer.weight.shape[-1], bias=bias
    )


def wide(layer: Any) -> Any:
    """Weights and biases so large that every branch of an activation is taken."""
    rng = np.random.default_rng(0)
    layer.update(
        tree_map(
            lambda a: mx.array(rng.normal(0, 0.3, a.shape).astype(np.float32)), layer.parameters()
        )
    )
    return layer


def test_gated_activations(isa: str) -> None:
    """Each gated activation, with biases, gives what mlx-lm's SwitchGLU gives."""
    rng = np.random.default_rng(1)
    x, chosen = rng.normal(size=(7, HIDDEN)).astype(np.float32), routes(rng, 7)
    for name, (parameters, activation) in GATED.items():
        switch = wide(SwitchGLU(HIDDEN, INNER, EXPERTS, activation=activation, bias=True))
        matrices = (stack(switch.gate_proj), stack(switch.up_proj), stack(switch.down_proj))
        out = ffn(matrices, name, x, chosen, parameters=parameters)
        should = np.array(switch(mx.array(x), mx.array(chosen))).reshape(out.shape)
        assert error(out, should) < 1e-5, name


def test_ungated_activations(isa: str) -> None:
    """Each activation without a gate gives what mlx-lm's SwitchMLP gives."""
    rng = np.random.default_rng(2)
    x, chosen = rng.normal(size=(7, HIDDEN)).astype(np.float32), routes(rng, 7)
    for name, activation in UNGATED.items():
        switch = wide(SwitchMLP(HIDDEN, INNER, EXPERTS, activation=activation))
        out = ffn((None, stack(switch.fc1), stack(switch.fc2)), name, x, chosen)
        should = np.array(switch(mx.array(x), mx.array(chosen))).reshape(out.shape)
        assert error(out, should) < 1e-5, name


def test_activations_at_their_ends(isa: str) -> None:
    """Very large values of either sign give what MLX gives, and NaN stays NaN."""
    ends = np.array([-1e4, -90, -30, -6, -1e-3, 0, 1e-3, 6, 30, 90, 1e4, np.nan], np.float32)
    one = kernels.Matrix(np.ones((1, 1, 1), np.float32), mode="plain", cols=1)
    for name, activation in UNGATED.items():
        out = ffn((None, one, one), name, ends[:, None], [[0]] * len(ends))
        should = np.array(activation(mx.array(ends)))[:, None]
        np.testing.assert_allclose(out, should, rtol=1e-5, atol=1e-6, err_msg=name)


def experts(
    rng: np.random.Generator, up: Format = Q4, down: Format = Q4
) -> tuple[kernels.Matrix, kernels.Matrix, kernels.Matrix]:
    """Gate, up and down of random weights."""
    shape = (EXPERTS, INNER, HIDDEN)
    gate, ups = (random_weight(form, shape, rng)[0] for form in (Q4, up))
    return gate, ups, random_weight(down, (EXPERTS, HIDDEN, INNER), rng)[0]


def test_formats_may_differ(isa: str) -> None:
    """Gate, up and down may each have a format of their own."""
    rng = np.random.default_rng(3)
    up, down = AFFINE[15], MXFP4
    (gate, g, _), (ups, u, _) = (
        random_weight(form, (EXPERTS, INNER, HIDDEN), rng) for form in (PLAIN[1], up)
    )
    downs, d, bias = random_weight(down, (EXPERTS, HIDDEN, INNER), rng, bias=True)
    x, chosen = rng.normal(size=(9, HIDDEN)).astype(np.float32), routes(rng, 9)
    should = []
    for row, slots in zip(x.astype(np.float64), chosen, strict=True):
        for e in slots:
            gated = g[e] @ row
            should.append(d[e] @ (gated / (1 + np.exp(-gated)) * (u[e] @ row)) + bias[e])
    for precision, most in ((kernels.F32, 1e-5), (kernels.INT8, 0.03)):
        out = ffn((gate, ups, downs), "swiglu", x, chosen, precision=precision)
        assert error(out, np.array(should)) < most


@pytest.mark.parametrize("precision", [kernels.F32, kernels.INT8])
def test_the_sum_is_in_the_order_of_pairs(precision: int, isa: str) -> None:
    """Weighted sums are the outputs times weights, added one after the other as they are routed."""
    rng = np.random.default_rng(4)
    matrices = experts(rng)
    x = rng.normal(size=(40, HIDDEN)).astype(np.float32)
    chosen = [rng.permutation(EXPERTS)[: n % 5].tolist() for n in range(40)]
    weights = rng.normal(size=sum(map(len, chosen))).astype(np.float32)
    outputs = ffn(matrices, "swiglu", x, chosen, precision=precision)
    sums, at = np.zeros((40, HIDDEN), np.float32), 0
    for row, slots in enumerate(chosen):
        for _ in slots:
            sums[row] += outputs[at] * weights[at]
            at += 1
    assert np.array_equal(ffn(matrices, "swiglu", x, chosen, weights, precision), sums)


@pytest.mark.parametrize("precision", [kernels.F32, kernels.INT8])
def test_a_row_is_alone(precision: int, isa: str, two_threads: None) -> None:
    """A row's sum has the same bits alone and among 700, in parts, and with one thread or two."""
    rng = np.random.default_rng(5)
    matrices = experts(rng)
    rows = 4100 if isa == kernels.isas()[0] else 300
    x, chosen = rng.normal(size=(rows, HIDDEN)).astype(np.float32), routes(rng, rows)
    weights = rng.random(2 * rows).astype(np.float32)
    among = ffn(matrices, "swiglu", x, chosen, weights, precision)
    kernels.set_threads(1)
    for first, last in ((0, 1), (5, 7), (200, 290), (rows - 1, rows)):
        part: Floats = weights[2 * first : 2 * last]
        alone = ffn(matrices, "swiglu", x[first:last], chosen[first:last], part, precision)
        assert np.array_equal(alone, among[first:last])


def test_no_pairs() -> None:
    """Rows that no expert computes sum to zero, and no rows to nothing."""
    rng = np.random.default_rng(6)
    matrices, none = experts(rng), np.empty(0, np.float32)
    assert not ffn(matrices, "swiglu", np.ones((3, HIDDEN), np.float32), [[], [], []], none).any()
    assert ffn(matrices, "swiglu", np.ones((0, HIDDEN), np.float32), [], none).shape == (0, HIDDEN)

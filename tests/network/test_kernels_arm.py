"""The native kernels with NEON and dotprod, emulated, against this machine's and MLX."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

import hatch_build
from expert_network import kernels
from expert_network.kernels import ops
from expert_protocol.dtypes import WireDType
from tests.network import emulated, kernel_cases
from tests.network.emulated import Emulator, Weight, case
from tests.network.kernel_cases import AFFINE, MXFP4, PLAIN, QUANTIZED, Floats, Format, error

REASON = emulated.why_not() or ("" if kernels.available() else kernels.reason())
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

F = np.float32
ACTIVATIONS = re.findall(
    r'X\(\w+, "(\w+)", (\d), (\d)\)',
    (hatch_build.ROOT / hatch_build.KERNELS / "activation.h").read_text(encoding="utf-8"),
)


@pytest.fixture(scope="module")
def objects() -> list[Path]:
    """The sources, compiled."""
    return emulated.compile_sources()


@pytest.fixture(scope="module")
def harness(objects: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels without Python."""
    made = tmp_path_factory.mktemp("arm") / "harness"
    emulated.link_harness(objects, made)
    return made


@pytest.fixture(params=["dotprod", "neon"])
def arm(request: pytest.FixtureRequest, harness: Path, tmp_path: Path) -> Emulator:
    """Either instruction set of 64-bit Arm."""
    return Emulator(harness, request.param, tmp_path)


def normal(rng: np.random.Generator, *shape: int) -> Floats:
    return rng.standard_normal(shape).astype(F)


def test_the_module_is_whole(objects: list[Path], tmp_path: Path) -> None:
    """The module for 64-bit Arm lacks nothing but Python and the C library."""
    module = tmp_path / "module.so"
    emulated.link_module(objects, module)
    lines = emulated.call("aarch64-linux-gnu-nm", "-D", module).splitlines()
    lacks = [line.split()[1] for line in lines if line.split()[0] == "U"]
    assert [name for name in lacks if not re.match(r"_?Py|.*@GLIBC", name)] == []
    assert any(line.endswith(" T PyInit__native") for line in lines)


def test_a_processor_gets_the_best_that_it_has(harness: Path) -> None:
    """dotprod where the processor has it, else NEON."""
    assert emulated.call(emulated.QEMU, harness).split()[:2] == ["dotprod", "neon"]
    old = emulated.call(emulated.QEMU, "-cpu", "cortex-a53", harness).split()
    assert (old[0], "dotprod" in old) == ("neon", False)


def linears(weight: Weight, x: Floats, precision: int, parts: list[slice]) -> list[bytes]:
    return [
        case("linear", *weight.case, precision, len(x[rows]), np.ascontiguousarray(x[rows]))
        for rows in parts
    ]


@pytest.mark.parametrize("precision", [kernels.F32, kernels.INT8])
def test_every_format(precision: int, arm: Emulator) -> None:
    """Products are MLX's within 1e-5 and this machine's; a row is the same alone and among 9."""
    rng = np.random.default_rng(0)
    parts = [slice(0, 9), slice(0, 1), slice(8, 9), slice(3, 5)]
    forms: list[Format] = [*PLAIN, *QUANTIZED] if precision == kernels.F32 else QUANTIZED
    cases, tried = [], []
    for form in forms:
        for rows, groups in ((13, 1), (6, 3), (5, 35)):
            weight = Weight(form, (rows, groups * (form.group_size or 31)), rng)
            x = normal(rng, 9, weight.cols)
            cases += linears(weight, x, precision, parts)
            tried.append((weight, x))
    results = arm.floats(cases)
    for n, (weight, x) in enumerate(tried):
        many, *some = (out.reshape(-1, weight.matrix.rows) for out in results[4 * n : 4 * n + 4])
        for part, out in zip(parts[1:], some, strict=True):
            assert np.array_equal(out, many[part]), (weight.form, part)
        assert error(many, kernel_cases.linear(weight.matrix, x, precision)) < 1e-5, weight.form
        if precision == kernels.F32:
            assert error(many, x @ weight.values.T + weight.bias) < 1e-5, weight.form


def test_no_sum_of_bytes_overflows(arm: Emulator) -> None:
    """int8 is exact at its ends: the largest and smallest weights times activations of ±127."""
    rng = np.random.default_rng(1)
    cases, should = [], []
    for form in (*AFFINE, MXFP4):
        weight = Weight(form, (2, 4 * form.group_size), rng)
        packed = np.zeros(weight.parts[0].shape, np.uint32)
        packed[0] = 0xFFFFFFFF if form.mode == "affine" else 0x77777777
        if form.mode == "mxfp4":
            packed[1] = 0xFFFFFFFF
        weight.keep([mx.array(packed), *weight.parts[1:]], weight.cols)
        ends = np.array([127, -127, 127, -127], F)
        x = np.stack([np.full(weight.cols, 127, F), np.repeat(ends, form.group_size)])
        x = np.concatenate([x, -x, np.where(rng.integers(0, 2, x.shape) > 0, 127, -127).astype(F)])
        cases += linears(weight, x, kernels.INT8, [slice(0, 6), slice(0, 1)])
        should += [x @ weight.values.T + weight.bias] * 2
    for out, right in zip(arm.floats(cases), should, strict=True):
        rows = len(out) // 2
        assert error(out.reshape(rows, 2), right[:rows]) < 1e-5


@pytest.mark.parametrize("precision", [kernels.F32, kernels.INT8])
def test_experts(precision: int, arm: Emulator) -> None:
    """Every activation, summed or by pair, is this machine's; a row alone is the same."""
    rng = np.random.default_rng(2)
    gate, up = (Weight(form, (4, 64, 128), rng) for form in (AFFINE[7], AFFINE[16]))
    down = Weight(MXFP4 if precision else PLAIN[1], (4, 40, 64), rng)
    x, routes = normal(rng, 9, 128) * 3, [rng.permutation(4)[: n % 4].tolist() for n in range(9)]
    weights = normal(rng, sum(map(len, routes)))
    cases, should = [], []
    for number, (name, count, gated) in enumerate(ACTIVATIONS):
        parameters = (1.702, 0.7)[-int(count) :] if int(count) else ()
        given = gate if int(gated) else None
        for some in (weights, None):
            stacks = (given, up, down)
            cases.append(experts(number, parameters, precision, stacks, x, routes, some))
            matrices = (given.matrix if given else None, up.matrix, down.matrix)
            should.append(kernel_cases.ffn(matrices, name, x, routes, some, precision, parameters))
    alone = experts(0, (), precision, (gate, up, down), x[3:4], routes[3:4], weights[3:6])
    *results, last = arm.floats([*cases, alone])
    for n, (out, right) in enumerate(zip(results, should, strict=True)):
        assert error(out, right.ravel()) < 1e-5, ACTIVATIONS[n // 2]
    assert np.array_equal(last, results[0].reshape(9, -1)[3])


def experts(
    activation: int,
    parameters: tuple[float, ...],
    precision: int,
    matrices: tuple[Weight | None, Weight, Weight],
    x: Floats,
    routes: list[list[int]],
    weights: Floats | None,
) -> bytes:
    offsets = np.cumsum([0, *map(len, routes)]).astype(np.uint32)
    slots = np.array([slot for row in routes for slot in row], np.uint32)
    four = (*parameters, 0, 0, 0, 0)[:4]
    stacks = [part for matrix in matrices if matrix for part in matrix.case]
    gated = matrices[0] is not None
    numbers = (activation, *four, precision, len(x), gated)
    return case("ffn", *numbers, *stacks, x, offsets, slots, weights)


STORED = {"float32": 0, "float16": 1, "bfloat16": 2}


def halves(values: Floats, dtype: str) -> NDArray[Any]:
    if dtype == "bfloat16":
        return WireDType.BF16.encode(values).view(np.uint16).reshape(values.shape)
    return values.astype(dtype)


# Heads of queries and of keys, queries, keys, depth, width.
SHAPES = [
    (4, 2, 1, 150, 64, 64),
    (6, 2, 2, 33, 12, 20),
    (4, 1, 40, 70, 24, 36),
    (2, 2, 50, 50, 16, 16),
]


def test_attention(arm: Emulator) -> None:
    """Few rows and many, every dtype of keys, causal, masks and sinks, is this machine's."""
    rng = np.random.default_rng(3)
    cases, should = [], []
    for heads, key_heads, length, keys, depth, width in SHAPES:
        for n, (k_dtype, k_number) in enumerate(STORED.items()):
            v_dtype = ["float32", "float16", "bfloat16"][(n + length) % 3]
            q = normal(rng, 2, heads, length, depth)
            k = halves(normal(rng, 2, key_heads, keys, depth), k_dtype)
            v = halves(normal(rng, 2, key_heads, keys, width), v_dtype)
            mask: Any = [None, rng.integers(0, 2, (length, keys)) > 0, normal(rng, length, keys)][n]
            sinks = normal(rng, heads) if n % 2 else None
            out = np.full((2, heads, length, width), np.nan, F)
            ops.attention(q, k, v, out, 0.3, mask is None, mask, sinks)
            should.append(out)
            strides = [stride for array in (q, k, v) for stride in array.strides[:3]]
            strides += [0, 0, *(mask.strides if n else (0, 0))]
            cases.append(
                case(
                    "attention",
                    *(2, heads, key_heads, length, keys, depth, width, 0.3),
                    *(mask is None, k_number, STORED[v_dtype], n, *strides),
                    *(q, k, v, mask, sinks),
                )
            )
    for out, right in zip(arm.floats(cases), should, strict=True):
        np.testing.assert_allclose(out, right.ravel(), rtol=0, atol=3e-6)


def test_rms_norm(arm: Emulator) -> None:
    """With a weight and without one, of any size, it is MLX's."""
    rng = np.random.default_rng(4)
    cases, should = [], []
    for size in (1, 8, 77, 256):
        x, weight = normal(rng, 7, size) * 5, normal(rng, size)
        for given in (weight, None):
            cases.append(case("rms_norm", 7, size, 1e-5, x, given))
            theirs = None if given is None else mx.array(given)
            should.append(np.array(mx.fast.rms_norm(mx.array(x), theirs, 1e-5)))
    for out, right in zip(arm.floats(cases), should, strict=True):
        np.testing.assert_allclose(out, right.ravel(), rtol=1e-6, atol=1e-7)


def test_softmax(arm: Emulator) -> None:
    """Rows of any size, with what is infinitely small among them, are MLX's."""
    rng = np.random.default_rng(6)
    rows = [normal(rng, 5, size) * 9 for size in (1, 8, 60, 129)]
    rows[2][:, 3] = -np.inf
    found = arm.floats([case("softmax", *x.shape, x) for x in rows])
    for x, out in zip(rows, found, strict=True):
        want = np.array(mx.softmax(mx.array(x), axis=-1)).ravel()
        np.testing.assert_allclose(out, want, rtol=2e-6, atol=1e-12)


def test_rope(arm: Emulator) -> None:
    """Both pairings, parts of a row, and positions to a million, are this machine's."""
    rng = np.random.default_rng(5)
    cases, should = [], []
    for traditional in (False, True):
        for size, dims in ((64, 64), (80, 22), (8, 6)):
            x, freqs = (
                normal(rng, 2, 3, 4, size),
                (np.abs(normal(rng, dims // 2)) * 50 + 1).astype(F),
            )
            offsets, out = np.array([17, 1_000_000], np.int32), np.empty((2, 3, 4, size), F)
            ops.rope(x, out, dims, traditional, None, 0.5, offsets, freqs)
            should.append(out)
            inverse = np.zeros(-(-dims // 32) * 16, F)
            inverse[: dims // 2] = F(1) / freqs
            numbers = (2, 3, 4, size, dims // 2, traditional, 0.5)
            cases.append(case("rope", *numbers, x, offsets, inverse))
    for out, right in zip(arm.floats(cases), should, strict=True):
        np.testing.assert_allclose(out, right.ravel(), rtol=0, atol=1e-6)


def test_rows_travel_in_the_same_bits(arm: Emulator) -> None:
    """Encoded, read, added and judged, in every form, as expert_protocol.dtypes defines it."""
    rng = np.random.default_rng(6)
    forms = [("f32", 4), ("bf16", 2), ("f16", 2), ("int8", 1)]
    cases, tried = [], []
    for number, (label, itemsize) in enumerate(forms):
        for size, factor in ((64, 1.0), (200, 1.0), (33, 1e-6), (130, 1e4), (70, np.inf)):
            x = normal(rng, size)
            x[::9] *= F(factor)
            cases.append(case("form", number, itemsize, size, x))
            tried.append((WireDType.from_label(label), x))
    results = arm(cases)
    for n, (dtype, x) in enumerate(tried):
        raw, decoded, total, fine = results[4 * n : 4 * n + 4]
        finite = bool(np.isfinite(x).all())
        assert fine == bytes([finite]) * 3, dtype
        if not finite:
            continue
        right = dtype.encode(x[None])
        assert raw == right.tobytes(), dtype
        values = dtype.decode(right)[0]
        np.testing.assert_array_equal(np.frombuffer(decoded, F), values)
        np.testing.assert_array_equal(np.frombuffer(total, F), x + values)

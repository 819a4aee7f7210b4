"""What the native kernels refuse: every argument is checked before memory is touched."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

from expert_network import kernels

if not kernels.available():
    pytest.skip(kernels.reason(), allow_module_level=True)

EXPERTS, INNER, HIDDEN = 3, 32, 64


def affine(**changes: Any) -> dict[str, Any]:
    """What makes a Matrix of two experts, four bits in groups of 32, with `changes`."""
    return {
        "weight": np.zeros((2, 8, 8), np.uint32),
        "scales": np.zeros((2, 8, 2), np.float16),
        "biases": np.zeros((2, 8, 2), np.float16),
        "mode": "affine",
        "dtype": "float16",
        "bits": 4,
        "group_size": 32,
        "cols": 64,
    } | changes


def plain(rows: int, cols: int, count: int = EXPERTS) -> kernels.Matrix:
    """A float32 stack of zeros."""
    return kernels.Matrix(np.zeros((count, rows, cols), np.float32), mode="plain", cols=cols)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"weight": np.zeros((2, 8, 7), np.uint32)}, "weight: rows of 28 bytes, not 32"),
        ({"weight": np.zeros((2, 8, 16), np.uint32)[:, :, ::2]}, "weight: no C-contiguous"),
        ({"weight": np.zeros(8, np.uint32)}, "weight: 1 dimensions"),
        ({"weight": np.zeros((0, 8, 8), np.uint32)}, "weight: shape"),
        ({"weight": None}, "weight: no C-contiguous buffer"),
        ({"scales": np.zeros((2, 8, 3), np.float16)}, "scales: rows of 6 bytes, not 4"),
        ({"scales": np.zeros((2, 8, 2), np.float32)}, "scales: rows of 8 bytes, not 4"),
        ({"scales": np.zeros((2, 7, 2), np.float16)}, r"scales: shape \(2, 7, ...\), not \(2, 8"),
        ({"biases": np.zeros((1, 8, 2), np.float16)}, "biases: shape"),
        ({"scales": None}, "scales: quantized weights have them"),
        ({"biases": None}, "biases: affine weights have them"),
        ({"mode": "plain", "scales": None, "cols": 16}, "biases: affine weights have them"),
        ({"mode": "nvfp4"}, "mode: nvfp4"),
        ({"mode": "mxfp4", "group_size": 64}, "group_size of mxfp4: 64, not 32"),
        ({"mode": "mxfp4", "bits": 8}, "bits of mxfp4: 8, not 4"),
        ({"dtype": "float64"}, "dtype: float64"),
        ({"bits": 7}, "bits: 7"),
        ({"bits": -1}, "bits: -1"),
        ({"group_size": 16}, "group_size: 16"),
        ({"group_size": 0}, "group_size: 0"),
        ({"cols": 65}, "cols: 65 is no multiple"),
        ({"cols": 0}, "cols: 0"),
        ({"cols": -64}, "cols: -64"),
        ({"cols": 2**40}, "cols: 1099511627776"),
        ({"bias": np.zeros((2, 7), np.float32)}, "bias: bytes"),
        ({"bias": np.zeros((1, 8), np.float32)}, "bias: bytes"),
        ({"bias": np.zeros((2, 8), np.float16)}, "bias: not of float32"),
        ({"bias": np.float32(1)}, "bias: dimensions"),
    ],
)
def test_matrix_refuses(changes: dict[str, Any], what: str) -> None:
    """A Matrix whose parts do not fit each other is not made, and the sentence says which part."""
    with pytest.raises(ValueError, match=what):
        kernels.Matrix(**affine(**changes))


def test_matrix_knows_its_shape_and_keeps_its_memory() -> None:
    """A Matrix needs no one else to keep its arrays, copies nothing, and has the stack's shape."""
    weight = np.ones((1, 4), np.float32)
    matrix = kernels.Matrix(weight, mode="plain", cols=4)
    assert (matrix.count, matrix.rows, matrix.cols) == (1, 1, 4)
    x, out = np.ones((1, 4), np.float32), np.empty((1, 1), np.float32)
    weight[0, 0] = 5
    del weight
    kernels.linear(matrix, x, out, kernels.F32)
    assert out.item() == 8


@pytest.mark.parametrize(
    ("at", "value", "what"),
    [
        (0, None, "matrix: not a Matrix"),
        (0, plain(8, 64), "matrix: a stack"),
        (1, np.zeros((2, 63), np.float32), r"x: shape \(2, 63\), not \(2, 64\)"),
        (1, np.zeros((2, 64)), "x: not of float32"),
        (1, np.zeros((64, 2), np.float32).T, "x: no C-contiguous buffer"),
        (1, np.zeros(64, np.float32), "x: 1 dimensions"),
        (2, np.zeros((2, 7), np.float32), "out: shape"),
        (2, np.zeros((1, 8), np.float32), "out: shape"),
        (2, bytes(64), "out: no writable"),
        (3, 2, "precision"),
        (3, "int8", "precision"),
    ],
)
def test_linear_refuses(at: int, value: Any, what: str) -> None:
    """linear names the argument that it cannot take."""
    x, out = np.zeros((2, 64), np.float32), np.zeros((2, 8), np.float32)
    arguments: list[Any] = [plain(8, 64, 1), x, out, kernels.F32]
    arguments[at] = value
    with pytest.raises(ValueError, match=what):
        kernels.linear(*arguments)


def whole_ffn(**changes: Any) -> None:
    """A dispatch of two rows with three pairs, with `changes`."""
    arguments: dict[str, Any] = {
        "gate": plain(INNER, HIDDEN),
        "up": plain(INNER, HIDDEN),
        "down": plain(HIDDEN, INNER),
        "activation": "swiglu",
        "parameters": (),
        "rows": np.zeros((2, HIDDEN), np.float32),
        "offsets": np.array([0, 2, 3], np.uint32),
        "slots": np.array([0, 1, 2], np.uint32),
        "weights": np.ones(3, np.float32),
        "out": np.zeros((2, HIDDEN), np.float32),
        "precision": kernels.F32,
    }
    kernels.ffn(**(arguments | changes))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"gate": None}, "gate: the activation"),
        ({"activation": "silu"}, "gate: the activation"),
        ({"gate": plain(INNER + 1, HIDDEN)}, "gate: of another shape"),
        ({"gate": plain(INNER, HIDDEN, 2)}, "stacks of different counts"),
        ({"down": plain(HIDDEN, INNER, 4)}, "stacks of different counts"),
        ({"down": plain(HIDDEN, INNER + 1)}, "down: as many cols"),
        ({"up": 3}, "up: not a Matrix"),
        ({"activation": "tanh"}, "activation: 'tanh' is unknown"),
        ({"activation": 7}, "activation: 7 is unknown"),
        ({"activation": "\ud800"}, "activation: .* is unknown"),
        ({"parameters": (1.0,)}, "parameters: not a tuple of as many"),
        ({"activation": "gpt_oss", "parameters": ("a", "b")}, "parameters: not numbers"),
        ({"rows": np.zeros((2, HIDDEN - 1), np.float32)}, "rows: not as wide"),
        ({"offsets": np.array([0, 3], np.uint32)}, "offsets: not one more"),
        ({"offsets": np.array([0, 2, 2], np.uint32)}, "offsets: they go from 0"),
        ({"offsets": np.array([1, 2, 3], np.uint32)}, "offsets: they go from 0"),
        ({"offsets": np.array([0, 4, 3], np.uint32)}, "offsets: they may not decrease"),
        ({"offsets": np.array([0, 2, 3], np.int64)}, "offsets: not of uint32"),
        ({"offsets": np.array([0, 2, 3], np.int32)}, "offsets: not of uint32"),
        ({"slots": np.array([0, 1, 3], np.uint32)}, "slots: one is not below"),
        ({"slots": np.array([0, 1, 2**32 - 1], np.uint32)}, "slots: one is not below"),
        ({"weights": np.ones(2, np.float32)}, "weights: not as many"),
        ({"weights": None}, "out: not of shape"),
        ({"out": np.zeros((3, HIDDEN), np.float32)}, "out: not of shape"),
        ({"precision": -1}, "precision"),
    ],
)
def test_ffn_refuses(changes: dict[str, Any], what: str) -> None:
    """ffn names the argument that it cannot take."""
    whole_ffn()
    with pytest.raises(ValueError, match=what):
        whole_ffn(**changes)


def test_more_that_is_refused() -> None:
    """Instruction sets, threads and memory that are not there are refused by name."""
    with pytest.raises(ValueError, match="isa: 'mmx' does not run here"):
        kernels.use_isa("mmx")
    for threads in (0, -1, 257):
        with pytest.raises(ValueError, match=f"threads: {threads} is not from 1 to 256"):
            kernels.set_threads(threads)
    memory = np.zeros(1 << 20, np.uint8)
    with pytest.raises(ValueError, match="streams: 3"):
        kernels.read_bandwidth(memory, 3)
    with pytest.raises(ValueError, match="memory: less than"):
        kernels.read_bandwidth(memory[1:], 1)
    assert kernels.read_bandwidth(memory, 8) > 0


def test_callers_take_turns() -> None:
    """Several threads may call at once, while another changes the number of threads."""
    results: list[float] = []

    def call(n: int) -> None:
        matrix = kernels.Matrix(np.full((65, 64), n, np.float32), mode="plain", cols=64)
        for _ in range(50):
            out = np.empty((5, 65), np.float32)
            kernels.linear(matrix, np.ones((5, 64), np.float32), out, kernels.F32)
            results.append(float(out.min()) / n)

    before = kernels.threads()
    callers = [threading.Thread(target=call, args=(n,)) for n in (1, 2, 4)]
    for caller in callers:
        caller.start()
    for n in (3, 1, 4, 2) * 5:
        kernels.set_threads(n)
    for caller in callers:
        caller.join()
    kernels.set_threads(before)
    assert results == [64.0] * 150


FORKED = """
import os, numpy as np
from expert_network import kernels
def call():
    matrix = kernels.Matrix(np.ones((500, 64), np.float32), mode="plain", cols=64)
    out = np.empty((5, 500), np.float32)
    kernels.linear(matrix, np.ones((5, 64), np.float32), out, kernels.F32)
    return bool((out == 64).all())
kernels.set_threads(3)
assert call()
child = os.fork()
if not child:
    os._exit(not call())
assert os.waitpid(child, 0)[1] == 0 and call()
"""


def test_a_forked_child_computes() -> None:
    """A child of fork, which has none of its parent's threads, starts its own."""
    subprocess.run([sys.executable, "-c", FORKED], check=True, timeout=60)

"""Native CPU kernels: routed experts, linear layers and attention, on MLX's packed weights.

A C module that the package builds where there is a compiler; ask `available()` before anything
else. Every function raises ValueError, naming the argument, for what it cannot take. Calls release
the GIL; concurrent ones take turns.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expert_network.kernels.ops import accumulate as accumulate
from expert_network.kernels.ops import attention as attention
from expert_network.kernels.ops import decode as decode
from expert_network.kernels.ops import encode as encode
from expert_network.kernels.ops import rms_norm as rms_norm
from expert_network.kernels.ops import rope as rope

Floats = NDArray[np.float32]
# An object with the buffer protocol.
Buffer = Any

# Part of the numerics id: raise it when results may change in a bit.
VERSION = 1

# Precisions of activations: as they are, or quantized to int8 in the weights' groups.
F32, INT8 = 0, 1

try:
    from expert_network.kernels import _native
    from expert_network.kernels._native import Matrix as Matrix
except ImportError as error:
    _reason = f"they cannot be loaded: {error}" if find_spec(f"{__name__}._native") else "not built"
else:
    _reason = "" if _native.VERSION == VERSION else "built from other sources: reinstall"


def available() -> bool:
    """Whether the module was built, from these sources."""
    return not _reason


def reason() -> str:
    """Why the kernels are not available; empty if they are."""
    return _reason


def isa() -> str:
    """The instruction set that runs: "avx512", "avx2", "dotprod", "neon" or "portable"."""
    return _native.isa()


def isas() -> list[str]:
    """The instruction sets that this processor runs, the best first."""
    return _native.isas()


def use_isa(name: str) -> None:
    """Run with another of `isas()`. For tests: it must not change while a kernel runs."""
    _native.use_isa(name)


def threads() -> int:
    """How many threads take part in a call at most."""
    return _native.threads()


def set_threads(n: int) -> None:
    """Use `n` threads, the caller's included, for all calls of this process from now on."""
    _native.set_threads(n)


def linear(matrix: Matrix, x: Floats, out: Floats, precision: int) -> None:
    """x (M, matrix.cols) times the transposed matrix, plus its bias, into out (M, matrix.rows).

    Both float32, C-contiguous, apart. `precision` F32 or INT8; plain weights always take F32.
    A row's result has the same bits whatever rows stand beside it and however many threads run.
    """
    _native.linear(matrix, x, out, precision)


def ffn(
    gate: Matrix | None,
    up: Matrix,
    down: Matrix,
    activation: str,
    parameters: tuple[float, ...],
    rows: Floats,
    offsets: NDArray[np.uint32],
    slots: NDArray[np.uint32],
    weights: Floats | None,
    out: Floats,
    precision: int,
) -> None:
    """Compute a dispatch through stacks of experts: down(activation(gate(x), up(x))).

    rows (R, up.cols); row r has the pairs offsets[r] to offsets[r + 1] (R + 1 of them), each with
    a slot in the stacks (P). With `weights` (P), out (R, down.rows) is each row's weighted sum,
    added in the order of its pairs, 0 without any; else out (P, down.rows) is each pair's output.
    Activations, with their parameters in brackets, as mlx-lm has them: with a gate "swiglu",
    "swiglu_clipped" (limit), "swiglu_clipped_after" (limit), "gpt_oss" (alpha, limit),
    "geglu_tanh", "geglu_erf", "geglu_fast"; without one "relu2", "silu", "gelu_tanh", "gelu_erf",
    "gelu_fast". The same promise as linear's.
    """
    _native.ffn(
        gate,
        up,
        down,
        activation,
        parameters,
        rows,
        offsets,
        slots,
        weights,
        out,
        precision,
    )


def experts(
    gate: Matrix | None,
    up: Matrix,
    down: Matrix,
    activation: str,
    parameters: tuple[float, ...],
    slots: NDArray[np.uint32],
) -> object:
    """The same stacks, for native code that computes rows one by one as `ffn` would.

    slots says where each expert of the layer stands in the stacks: (experts,), anything beyond
    their count for one that does not.
    """
    return _native.experts(gate, up, down, activation, parameters, slots)


def no_experts(hidden: int) -> object:
    """Experts that give zeros: those of a layer that has none, or to measure the rest of a row."""
    return _native.no_experts(hidden)


def swap_experts(one: object, other: object) -> None:
    """Let each be what the other was. Nobody may be computing with either.

    So a layer's experts change under native code that goes on with the object it was given.
    """
    _native.swap_experts(one, other)


def read_bandwidth(memory: Buffer, streams: int) -> float:
    """Seconds that all threads take to read `memory` once, each several parts of it at once.

    The line that a kernel's speed is compared with. `memory` is C-contiguous, of any type; parts
    of 1 MiB are spread over the threads, and a part is read as `streams` (1, 2, 4, 8, 16) runs.
    """
    return _native.read_bandwidth(memory, streams)

"""Native CPU kernels: routed experts, linear layers and attention, on MLX's packed weights.

A C module that the package builds where there is a compiler; ask `available()` before anything
else. Every function raises ValueError, naming the argument, for what it cannot take. Calls release
the GIL; concurrent ones take turns.
"""

from __future__ import annotations

from expert_network.kernels.ops import accumulate as accumulate
from expert_network.kernels.ops import attention as attention
from expert_network.kernels.ops import decode as decode
from expert_network.kernels.ops import encode as encode
from expert_network.kernels.ops import rms_norm as rms_norm
from expert_network.kernels.ops import rope as rope

# Part of the numerics id: raise it when results may change in a bit.
VERSION = 1

try:
    from expert_network.kernels import _native
except ImportError as error:
    _reason = f"not built ({error})"
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

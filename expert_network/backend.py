"""Which MLX and which kernels run here, in which precision, and the numerics id that names them."""

from __future__ import annotations

import os
import platform
import resource
import sys
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from expert_network import kernels
from expert_network.errors import BackendMissing

Kernels = Literal["auto", "native", "mlx"]


@dataclass(frozen=True)
class Backend:
    """The MLX of this process.

    `name` is "mlx-cpu", "mlx-metal" or "mlx-cuda"; `version` is MLX's and mlx-lm's, which has the
    activations; `isa` is the instruction-set class of a CPU ("avx512", "avx2", "x86", "neon") or
    the architecture that a GPU names itself. `native` says that our own kernels compute in MLX's
    place: `isa` is then the one that they chose.
    """

    name: str
    version: str
    isa: str
    native: bool = False

    def compute_dtype(self, stored: str) -> str:
        """The dtype of activations for a checkpoint whose activation dtype is `stored`."""
        # MLX on CPU has GatherMM for float32 only, and is ten times slower on quantized bfloat16.
        return "float32" if self.name == "mlx-cpu" else stored

    def numerics(self, compute_dtype: str) -> str:
        """The id that two processes must share to promise each other identical bits."""
        # MLX computes the layers that the native kernels lack: so its version counts either way.
        kernel = f"native-{kernels.VERSION}" if self.native else "switch"
        kernel = f"{kernel}-{self.version}"
        return f"{self.name}/{kernel}/{compute_dtype}/{self.isa}"

    def computing(self, precise: bool) -> str:
        """What computes, for a person: "native avx2, int8" or "mlx-cpu"."""
        if not self.native:
            return self.name
        return f"native {self.isa}, {'f32' if precise else 'int8'}"


def start_kernels_at_once() -> None:
    """Let MLX on CUDA start kernels one by one, unless this process was told otherwise.

    For processes that wait for MLX in each layer: it collects kernels in a graph first, which takes
    longer than it saves when the GPU idles meanwhile. Call it before anything computes.
    """
    os.environ.setdefault("MLX_USE_CUDA_GRAPHS", "0")


def detect(choice: Kernels = "auto", threads: int | None = None) -> Backend:
    """Import MLX and say what it is, and whether our kernels compute in its place.

    They do on "mlx-cpu" where they were built, unless `choice` is "mlx", with as many `threads` as
    given or as there are cores. Raises BackendMissing where MLX cannot be imported, or where
    "native" is chosen and cannot be.

    Call it before anything that imports mlx. On CPU it turns mx.compile off for this process.
    """
    backend = _detect_mlx()
    missing = "" if backend.name == "mlx-cpu" else f"they are for a CPU, and this is {backend.name}"
    missing = missing or kernels.reason()
    if choice == "native" and missing:
        raise BackendMissing(
            f"the native kernels cannot be used ({missing.rstrip('.')}); leave --kernels out, or "
            "reinstall expert-network where there is a C compiler."
        )
    if choice == "mlx" or missing:
        return backend
    if threads is not None:
        kernels.set_threads(threads)
    return replace(backend, isa=kernels.isa(), native=True)


def _detect_mlx() -> Backend:
    try:
        import mlx.core as mx
    except ImportError as error:
        raise BackendMissing(_how_to_install(str(error), sys.platform)) from error
    _import_mlx_lm()
    if mx.default_device().type == mx.DeviceType.cpu:
        # There it calls a C++ compiler: seconds at first use, a failure on a machine without one.
        mx.disable_compile()
        return Backend("mlx-cpu", _versions(), _cpu_isa(platform.machine(), _cpu_flags()))
    name = "mlx-metal" if mx.metal.is_available() else "mlx-cuda"
    return Backend(name, _versions(), str(mx.device_info().get("architecture", "gpu")))


def _import_mlx_lm() -> None:
    """Import mlx-lm, which sets the limit of open files: lower than some, or above what is allowed.

    This process keeps the limit that it was given.
    """
    setrlimit, resource.setrlimit = resource.setrlimit, lambda *_: None
    try:
        import mlx_lm.utils  # noqa: F401
    finally:
        resource.setrlimit = setrlimit


def _versions() -> str:
    return f"{version('mlx')}-{version('mlx-lm')}"


def _how_to_install(reason: str, system: str) -> str:
    if system == "darwin":
        advice = "reinstall it: pip install --force-reinstall mlx"
    else:
        advice = (
            'install one: pip install "expert-network[cpu]" (in a checkout: ".[cpu]"), or on an '
            'NVIDIA machine "expert-network[cuda13]", never both'
        )
    return f"MLX has no backend in this environment ({reason.rstrip('.')}); {advice}."


def _cpu_isa(machine: str, flags: frozenset[str]) -> str:
    if machine.lower() in ("arm64", "aarch64"):
        return "neon"
    if "avx512f" in flags:
        return "avx512"
    return "avx2" if "avx2" in flags else "x86"


def _cpu_flags() -> frozenset[str]:
    """The instruction sets that Linux lists; empty elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    lines = (line.partition(":")[2] for line in text.splitlines() if line.startswith("flags"))
    return frozenset(next(lines, "").split())

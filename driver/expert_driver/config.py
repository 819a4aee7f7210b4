"""What the command line decided, in frozen dataclasses. No environment, no files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from expert_network.backend import Kernels
from expert_network.errors import InputError
from expert_network.net.auth import ClusterKey


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; names and meanings are mlx-lm's."""

    max_tokens: int = 512
    temp: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False


@dataclass(frozen=True)
class Computing:
    """Which kernels compute in this process, and how precisely here and on nodes.

    `precision` is "int8", "f32", or "auto": f32 with --exact, else int8 where kernels have it.
    """

    precision: str = "auto"
    kernels: Kernels = "auto"
    threads: int | None = None

    def precise(self, exact: bool) -> bool:
        """Whether activations stay float32. Raises InputError for int8 with --exact."""
        if exact and self.precision == "int8":
            raise InputError("--exact is never computed in int8; leave one of the two out.")
        return exact or self.precision == "f32"


@dataclass(frozen=True)
class NetworkConfig:
    """Which nodes, and how to talk to them. No nodes: all experts in this process.

    `wire` is "bf16", "f16", "f32" or "int8", None for the mode's own; `home` holds the models
    folder and the cache. hedge: whether replicas are asked too for a row that is late.
    """

    nodes: tuple[str, ...]
    exact: bool
    wire: str | None
    key: ClusterKey | None
    home: Path
    computing: Computing = Computing()
    hedge: bool = False

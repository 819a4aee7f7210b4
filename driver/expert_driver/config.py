"""What the command line decided, in frozen dataclasses. No environment, no files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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
class NetworkConfig:
    """Which nodes, and how to talk to them. No nodes: all experts in this process.

    `wire` is "bf16", "f16", "f32" or "int8", None for the mode's own; `home` holds the models
    folder and the cache.
    """

    nodes: tuple[str, ...]
    exact: bool
    wire: str | None
    key: ClusterKey | None
    home: Path

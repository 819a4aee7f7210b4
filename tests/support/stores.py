"""Small stores written by hand: no model behind them, so no MLX is needed."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

from expert_network.store.manifest import (
    ALIGNMENT,
    CONFIG,
    MANIFEST,
    TRUNK,
    FileSpec,
    LayerSpec,
    Manifest,
    align,
    canonical,
    lay_out,
)

TENSORS = [
    ("gate_proj.weight", "bfloat16", (48, 64)),
    ("up_proj.weight", "bfloat16", (48, 64)),
    ("down_proj.weight", "bfloat16", (64, 48)),
    ("down_proj.bias", "float32", (64,)),
]


def block(layer: int, expert: int) -> bytes:
    """The bytes of one block of such a store; they differ from block to block."""
    size = lay_out(TENSORS)[1]
    return random.Random(layer * 1000 + expert).randbytes(size)


def layer_spec(layer: int, experts: int) -> LayerSpec:
    """One layer of such a store."""
    tensors, size = lay_out(TENSORS)
    return LayerSpec(
        layer,
        f"model.layers.{layer}.mlp.switch_mlp",
        experts,
        64,
        tensors,
        size,
        align(size, ALIGNMENT),
        tuple(hashlib.sha256(block(layer, expert)).hexdigest() for expert in range(experts)),
    )


def write_store(
    path: Path,
    layers: tuple[int, ...] = (0, 1),
    experts: int = 3,
    config: dict[str, object] | None = None,
    files: dict[str, bytes] | None = None,
) -> Manifest:
    """Write a whole store and return its manifest."""
    (path / "bin").mkdir(parents=True)
    content = {
        CONFIG: canonical({"model_type": "made_up"} if config is None else config),
        TRUNK: bytes(1000),
        **(files or {}),
    }
    for name, data in content.items():
        (path / name).write_bytes(data)
    specs = tuple(layer_spec(layer, experts) for layer in layers)
    for spec in specs:
        with (path / spec.file).open("wb") as file:
            for expert in range(spec.experts):
                file.write(block(spec.layer, expert).ljust(spec.stride, b"\0"))
    manifest = Manifest(
        "made_up",
        "bfloat16",
        specs,
        {
            name: FileSpec(len(data), hashlib.sha256(data).hexdigest())
            for name, data in content.items()
        },
    )
    (path / MANIFEST).write_bytes(manifest.to_bytes())
    return manifest


def flip(path: Path, offset: int) -> None:
    """Change one byte of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(1)
        file.seek(offset)
        file.write(bytes([old[0] ^ 0xFF]))

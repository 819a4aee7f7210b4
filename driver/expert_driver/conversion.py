"""A checkpoint becomes a store, with a bar while it does and a summary at the end."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from expert_network import places
from expert_network.backend import detect
from expert_network.commandline import progress
from expert_network.store.reader import Store
from expert_network.units import size

BITS = (2, 3, 4, 6, 8)
GROUP_SIZES = (32, 64, 128)


def convert(src: Path, out: Path, bits: int | None, group_size: int, home: Path) -> Store:
    """Convert, draw, and print the summary. Raises as `preprocess` does."""
    detect()
    from expert_network.store.convert import preprocess

    try:
        with progress() as report:
            store = preprocess(src, out, bits, group_size, report, _warn)
    except KeyboardInterrupt:
        click.echo("\nstopped; the same command goes on from the last finished layer", err=True)
        raise
    click.echo(summary(store, home))
    return store


def summary(store: Store, home: Path) -> str:
    """What the store holds, and the command to type next."""
    manifest = store.manifest
    layers = manifest.layers
    experts = sorted({spec.experts for spec in layers})
    blocks = sorted({spec.block_bytes for spec in layers})
    trunk = manifest.files["trunk.safetensors"].size
    rows = [
        ("store", str(store.path)),
        ("model", f"{manifest.model_type}, {_weights(store)}"),
        ("MoE layers", f"{len(layers)}, of {_span([str(count) for count in experts])} experts"),
        ("blocks", f"{manifest.block_count:,}, {_span([size(count) for count in blocks])} each"),
        ("trunk", size(trunk)),
        ("total", size(manifest.total_bytes)),
        ("digest", manifest.digest),
        ("next", next_command(store, home)),
    ]
    return "\n".join(f"{label:<12}{value}" for label, value in rows)


def next_command(store: Store, home: Path) -> str:
    """How to run it: by name if it stands in the models folder, by path elsewhere."""
    name = shlex.quote(call_name(store.path, home))
    if store.has_tokenizer:
        return f"expert-net {name} --chat"
    return f"expert-net logits {name} --ids 1,2,3 -o logits.npy"


def call_name(path: Path, home: Path) -> str:
    """What a command line calls the store at `path`."""
    try:
        return path.resolve().relative_to(places.models_dir(home).resolve()).as_posix()
    except ValueError:
        # A bare word would be looked for among the commands first.
        return str(path) if path.is_absolute() or len(path.parts) > 1 else f"./{path}"


def _weights(store: Store) -> str:
    quantization = store.config.get("quantization")
    if not isinstance(quantization, dict):
        return store.manifest.dtype
    mode = quantization.get("mode", "affine")
    return f"{quantization['bits']}-bit {mode}, groups of {quantization['group_size']}"


def _span(values: list[str]) -> str:
    return values[0] if len(values) == 1 else f"{values[0]} to {values[-1]}"


def _warn(sentence: str) -> None:
    click.echo(f"warning: {sentence}", err=True)

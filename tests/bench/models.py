"""Stores of random 4-bit weights in the shape of known models, written without a checkpoint.

`python -m tests.bench.models olmoe --dir DIR` makes DIR/olmoe; tests/bench/shapes.py has the names.
The weights are such that activations keep their size from layer to layer, and that routers choose
all experts about equally often.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import zlib
from collections.abc import Mapping
from functools import lru_cache
from math import sqrt
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model
from platformdirs import user_cache_path

from expert_network.commandline import progress
from expert_network.model.checkpoint import model_classes
from expert_network.model.seam import find_switches
from expert_network.progress import Progress, silent
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
from expert_network.store.reader import Store
from expert_network.store.trunk_file import TensorSource, serialize
from expert_network.store.writer import StoreWriter
from tests.bench.shapes import GROUP, SHAPES, Shape, shape_named
from tests.support.synthetic import add_tokenizer

_VERSION = 1  # of what is written: raise it when the bytes change
_BITS = 4
_NOISE = 1 << 24  # bytes; longer tensors repeat them, each from a starting point of its own
_SCALES = 1 << 16  # different scales

Bytes = npt.NDArray[np.uint8]
Arrays = Mapping[str, mx.array]


def default_dir() -> Path:
    """Where models and builds of the benchmark stand: outside any checkout."""
    return user_cache_path("expert-network", appauthor=False) / "bench"


def make_store(shape: Shape, folder: Path, report: Progress = silent) -> Path:
    """The store of `shape` in `folder`, written if it is not there yet.

    Holds one tensor in memory at a time. The same shape gives the same bytes. Raises StoreError
    and DiskFull as conversion does.
    """
    out = folder / shape.name
    if (out / MANIFEST).exists():
        return out
    folder.mkdir(parents=True, exist_ok=True)
    model, config = lazy_model(shape)
    arrays: Arrays = dict(tree_flatten(model.parameters()))
    layers = [_layer_spec(site) for site in find_switches(model)]
    trunk = _trunk(arrays, layers)
    with StoreWriter(out, f"random {_VERSION} {shape}") as writer:
        total = sum(spec.file_bytes for spec in layers) + sum(source.nbytes for source in trunk)
        writer.reserve(total + (8 << 20))
        written = []
        for spec in layers:
            written.append(writer.finished(spec) or _write_layer(writer, spec))
            done = sum(spec.file_bytes for spec in written)
            report(done, total, f"writing {shape.name}")
        files = _add_files(writer, config, trunk)
        writer.finish(Manifest(shape.family, "bfloat16", tuple(written), files))
    report(total, total, f"writing {shape.name}")
    return Store.open(out).path


def lazy_model(shape: Shape) -> tuple[Any, dict[str, Any]]:
    """mlx-lm's model, quantized as it would be, with nothing evaluated; and its config."""
    config = shape.config()
    classes: tuple[Any, Any] = model_classes(config)
    model = classes[0](classes[1].from_dict(config))
    model.set_dtype(mx.bfloat16)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its bits per weight
        return quantize_model(model, config, GROUP, _BITS)


def _layer_spec(site: Any) -> LayerSpec:
    tensors: Any = tree_flatten(site.module.parameters())
    specs, block = lay_out([(name, _dtype(a), tuple(a.shape[1:])) for name, a in tensors])
    first = site.module["gate_proj"]
    return LayerSpec(
        *(site.layer, site.path, first.num_experts, first.input_dims),
        *(specs, block, align(block, ALIGNMENT), ()),
    )


def _write_layer(writer: StoreWriter, spec: LayerSpec) -> LayerSpec:
    shapes = {tensor.name: tensor.shape for tensor in spec.tensors}
    with writer.layer(spec) as file:
        for expert in range(spec.experts):
            for tensor in spec.tensors:
                seed = _seed(spec.layer, expert, tensor.offset)
                data = _random(tensor.name, tensor.dtype, tensor.shape, shapes, seed)
                file.put(expert, tensor, data.data)
        return writer.finish_layer(file)


def _trunk(arrays: Arrays, layers: list[LayerSpec]) -> list[TensorSource]:
    shapes = {name: tuple(array.shape) for name, array in arrays.items()}
    routed = {f"{spec.path}.{tensor.name}" for spec in layers for tensor in spec.tensors}

    def source(name: str, seed: int) -> TensorSource:
        dtype, shape = _dtype(arrays[name]), shapes[name]
        return TensorSource(
            name, dtype, shape, lambda: _random(name, dtype, shape, shapes, seed).data
        )

    names = sorted(arrays.keys() - routed)
    return [source(name, _seed(-1, seed)) for seed, name in enumerate(names)]


def _add_files(
    writer: StoreWriter, config: dict[str, Any], trunk: list[TensorSource]
) -> dict[str, FileSpec]:
    with TemporaryDirectory() as folder:
        add_tokenizer(Path(folder))
        files = {path.name: writer.add_copy(path) for path in sorted(Path(folder).iterdir())}
    files[CONFIG] = writer.add(CONFIG, [canonical(config)])
    files[TRUNK] = writer.add(TRUNK, serialize(trunk))
    return files


# --- random numbers


def random_array(name: str, like: mx.array, shapes: Mapping[str, tuple[int, ...]]) -> mx.array:
    """An array of random numbers that can stand for `like`; see `_random`."""
    shape = tuple(like.shape)
    data = _random(name, _dtype(like), shape, shapes, zlib.crc32(name.encode()))
    return mx.array(data).view(like.dtype).reshape(shape)


def _random(
    name: str, dtype: str, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]], seed: int
) -> Bytes:
    """The bytes of one tensor; `shapes` has those of the tensors beside it."""
    module, _, kind = name.rpartition(".")
    scales = shapes.get(f"{module}.scales")
    if scales is None:  # a norm
        assert dtype == "bfloat16", name
        return np.full(shape, 0x3F80, np.uint16).reshape(-1).view(np.uint8)
    if dtype == "uint32":
        return _tiled(_noise(), 4 * int(np.prod(shape)), seed)
    row = scales[-1] * GROUP
    bits = 32 * shapes[f"{module}.weight"][-1] // row
    return _tiled(_scales(row, bits)[kind], 2 * int(np.prod(shape)), _seed(seed, row))


def _seed(*numbers: int) -> int:
    return zlib.crc32(repr(numbers).encode())


@lru_cache(1)
def _noise() -> Bytes:
    return np.random.default_rng(0).integers(0, 256, _NOISE, np.uint8)


@lru_cache(16)
def _scales(row: int, bits: int) -> dict[str, Bytes]:
    """Scales and biases of rows of `row` weights whose squares add up to about 1.

    A quantized weight is one of 2**bits values, all equally likely, around 0.
    """
    most = (1 << bits) - 1
    deviation = sqrt(((1 << bits) ** 2 - 1) / 12)
    spread = np.random.default_rng(1).uniform(0.5, 1.5, _SCALES)
    scales = _to_bfloat16(spread / (deviation * sqrt(row)))
    biases = _to_bfloat16(-most / 2 * (scales.astype(np.uint32) << 16).view(np.float32))
    return {"scales": scales.view(np.uint8), "biases": biases.view(np.uint8)}


def _to_bfloat16(values: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.uint16]:
    """Cut off, as raw bits."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _tiled(noise: Bytes, count: int, seed: int) -> Bytes:
    """`count` bytes of `noise`, over and over, from a place of `seed`'s own on."""
    start = seed % (len(noise) // 64) * 64
    if start + count <= len(noise):
        return noise[start : start + count]
    return np.resize(np.roll(noise, -start), count)


def _dtype(array: mx.array) -> str:
    return str(array.dtype).removeprefix("mlx.core.")


def main() -> None:
    """The command line of this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", help=f"{', '.join(SHAPES)}; olmoe-2 has 2 layers")
    parser.add_argument("--dir", type=Path, default=default_dir())
    options = parser.parse_args()
    for name in options.names:
        with progress() as report:
            print(make_store(shape_named(name), options.dir, report))


if __name__ == "__main__":
    main()

"""The same shapes as GGUF, Q4_0 throughout, for llama.cpp. Needs PyPI's `gguf` and nothing of ours.

`python tests/bench/gguf_twin.py olmoe --dir DIR` writes DIR/olmoe.gguf.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from functools import lru_cache
from math import prod, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

if __name__ == "__main__":  # run by a Python that does not have our packages
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.bench.shapes import Shape, shape_named

_BLOCK, _BLOCK_BYTES = 32, 18  # of Q4_0: one float16 scale and 32 weights of 4 bits
_NOISE = 1 << 19  # blocks; longer tensors repeat them
_DEVIATION = sqrt((16**2 - 1) / 12)

Bytes = npt.NDArray[np.uint8]


def make_gguf(shape: Shape, folder: Path) -> Path:
    """Write the twin of `shape` unless it is there; one tensor is in memory at a time."""
    out = folder / f"{shape.name}.gguf"
    if out.exists():
        return out
    folder.mkdir(parents=True, exist_ok=True)
    partial = out.with_suffix(".partial")
    _write(shape, partial)
    os.replace(partial, out)
    return out


def _write(shape: Shape, path: Path) -> None:
    import gguf

    arch = {"olmoe": "olmoe", "qwen3_moe": "qwen3moe"}[shape.family]
    writer = gguf.GGUFWriter(str(path), arch)
    _add_facts(writer, shape)
    plain, q4 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q4_0
    for name, extents in tensors(shape):
        floats = is_plain(name)
        kind = plain if floats else q4
        writer.add_tensor_info(
            name, extents, np.dtype(np.float32), nbytes(name, extents), raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for number, (name, extents) in enumerate(tensors(shape)):
        writer.write_tensor_data(_random(name, extents, number))
    writer.close()


def _add_facts(writer: Any, shape: Shape) -> None:
    writer.add_name(shape.name)
    writer.add_context_length(shape.longest)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_expert_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.per_token)
    writer.add_vocab_size(shape.vocab)
    writer.add_tokenizer_model("none")  # llama-bench works with ids alone
    writer.add_file_type(2)  # mostly Q4_0


def tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, rows last, in the order of the file."""
    d, v, e, i = shape.hidden, shape.vocab, shape.experts, shape.intermediate
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms = (d, d) if shape.family == "olmoe" else (shape.head_dim, shape.head_dim)
    yield from (("token_embd.weight", (v, d)), ("output_norm.weight", (d,)))
    yield ("output.weight", (v, d))
    for layer in range(shape.layers):
        for name, extents in (
            ("attn_norm", (d,)),
            ("attn_q", (q, d)),
            ("attn_k", (kv, d)),
            ("attn_v", (kv, d)),
            ("attn_output", (d, q)),
            ("attn_q_norm", norms[:1]),
            ("attn_k_norm", norms[1:]),
            ("ffn_norm", (d,)),
            ("ffn_gate_inp", (e, d)),
            ("ffn_gate_exps", (e, i, d)),
            ("ffn_up_exps", (e, i, d)),
            ("ffn_down_exps", (e, d, i)),
        ):
            yield f"blk.{layer}.{name}.weight", extents


def is_plain(name: str) -> bool:
    """Whether llama.cpp keeps this tensor in float32: norms and routers."""
    return "norm" in name or "ffn_gate_inp" in name


def nbytes(name: str, extents: tuple[int, ...]) -> int:
    """Bytes of a tensor in the file."""
    count = prod(extents)
    return 4 * count if is_plain(name) else count // _BLOCK * _BLOCK_BYTES


def _random(name: str, extents: tuple[int, ...], number: int) -> npt.NDArray[Any]:
    """One tensor; the squares of a row's weights add up to about 1, and norms are 1."""
    if "norm" in name:
        return np.ones(extents, np.float32)
    if is_plain(name):
        noise = np.random.default_rng(number).standard_normal(extents, np.float32)
        return noise / np.float32(sqrt(extents[-1]))
    blocks, start = prod(extents) // _BLOCK, number * 7919 % _NOISE
    return np.resize(np.roll(_blocks(extents[-1]), -start, axis=0), (blocks, _BLOCK_BYTES))


@lru_cache(4)
def _blocks(row: int) -> Bytes:
    random = np.random.default_rng(0)
    made = random.integers(0, 256, (_NOISE, _BLOCK_BYTES), np.uint8)
    scales = random.uniform(0.5, 1.5, _NOISE) / (_DEVIATION * sqrt(row))
    made[:, :2] = scales.astype("<f2").view(np.uint8).reshape(-1, 2)
    return made


def main() -> None:
    """The command line of this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--dir", type=Path, required=True)
    options = parser.parse_args()
    for name in options.names:
        print(make_gguf(shape_named(name), options.dir))


if __name__ == "__main__":
    main()

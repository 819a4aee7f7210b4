"""Make Hugging Face checkpoints of any size out of cheap numbers, never holding one in memory.

`python -m tests.support.synthetic OUT --gigabytes 3` writes one for measurements by hand.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

_NOISE = 1 << 20  # elements; longer tensors repeat them, each from its own starting point
_SHARD = 500_000_000  # bytes

Tensors = list[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Shape:
    """The dimensions of a synthetic model: `family` is "olmoe" or "qwen3_moe"."""

    family: str = "olmoe"
    layers: int = 2
    experts: int = 8
    per_token: int = 2
    hidden: int = 64
    intermediate: int = 64
    heads: int = 4
    vocab: int = 256
    dtype: str = "bfloat16"

    def config(self) -> dict[str, Any]:
        """The checkpoint's config.json."""
        common = {
            "model_type": self.family,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "num_experts": self.experts,
            "num_experts_per_tok": self.per_token,
            "norm_topk_prob": False,
            "rms_norm_eps": 1e-5,
            "vocab_size": self.vocab,
            "rope_theta": 10000.0,
            "max_position_embeddings": 512,
            "tie_word_embeddings": False,
            "eos_token_id": 2,
            "torch_dtype": self.dtype,
        }
        if self.family == "olmoe":
            return common
        return common | {
            "moe_intermediate_size": self.intermediate,
            "head_dim": self.hidden // self.heads,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }

    def tensors(self) -> Tensors:
        """Name and shape of every tensor, in the order in which they are written."""
        d, v = self.hidden, self.vocab
        outside: Tensors = [
            ("model.embed_tokens.weight", (v, d)),
            ("model.norm.weight", (d,)),
            ("lm_head.weight", (v, d)),
        ]
        return outside + [item for layer in range(self.layers) for item in self._layer(layer)]

    def _layer(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        d, i, name = self.hidden, self.intermediate, f"model.layers.{layer}"
        # olmoe normalises whole projections, qwen3_moe each head.
        norm = d if self.family == "olmoe" else d // self.heads
        for part in "qkvo":
            yield f"{name}.self_attn.{part}_proj.weight", (d, d)
        for part in "qk":
            yield f"{name}.self_attn.{part}_norm.weight", (norm,)
        for part in ("input", "post_attention"):
            yield f"{name}.{part}_layernorm.weight", (d,)
        yield f"{name}.mlp.gate.weight", (self.experts, d)
        for expert in range(self.experts):
            for part, shape in (("gate", (i, d)), ("up", (i, d)), ("down", (d, i))):
                yield f"{name}.mlp.experts.{expert}.{part}_proj.weight", shape

    def layer_bytes(self) -> int:
        """Bytes of one layer's experts as they stand in the checkpoint."""
        return 3 * self.experts * self.hidden * self.intermediate * _itemsize(self.dtype)

    def trunk_bytes(self) -> int:
        """Bytes of everything else."""
        return _bytes(self.tensors(), self.dtype) - self.layers * self.layer_bytes()


def of_size(count: int, family: str = "olmoe") -> Shape:
    """A bfloat16 model of at least `count` bytes in 12 layers of 64 experts, 1024 wide."""
    layers, experts, hidden = 12, 64, 1024
    rows = -(-count // (3 * layers * experts * hidden * 2))
    return Shape(family, layers, experts, 8, hidden, -(-rows // 64) * 64, 16, 8192)


def make_checkpoint(
    path: Path, shape: Shape, *, seed: int = 0, shard_bytes: int = _SHARD, shuffle: bool = False
) -> Path:
    """Write the checkpoint and return `path`. One shard gets the single file's name.

    With `shuffle` the tensors lie in another order in the files; their values are the same.
    """
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(shape.config(), indent=2))
    noise = _noise(shape.dtype, seed)
    starts = {name: n * 4099 % _NOISE for n, (name, _) in enumerate(shape.tensors())}
    shards = _split(shape, shard_bytes, shuffle)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        many = len(shards) > 1
        name = f"model-{number:05}-of-{len(shards):05}" if many else "model"
        with (path / f"{name}.safetensors").open("wb") as file:
            _write_shard(file, shard, shape.dtype, noise, starts)
        weight_map |= {tensor: f"{name}.safetensors" for tensor, _ in shard}
    if len(shards) > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def add_tokenizer(path: Path, vocab: int = 256) -> None:
    """Put a small byte-level tokenizer beside a checkpoint."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: vocab - 3]
    tokens = ["<pad>", "<s>", "</s>", *alphabet]
    tokenizer = Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def _split(shape: Shape, shard_bytes: int, shuffle: bool) -> list[Tensors]:
    tensors = shape.tensors()
    if shuffle:
        random.Random(1).shuffle(tensors)
    shards: list[Tensors] = [[]]
    room = shard_bytes
    for tensor in tensors:
        nbytes = _bytes([tensor], shape.dtype)
        if shards[-1] and nbytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= nbytes
    return shards


def _noise(dtype: str, seed: int) -> npt.NDArray[Any]:
    values = np.random.default_rng(seed).normal(0, 0.02, _NOISE).astype(np.float32)
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype)


def _write_shard(
    file: BinaryIO,
    tensors: Tensors,
    dtype: str,
    noise: npt.NDArray[Any],
    starts: dict[str, int],
) -> None:
    label = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors:
        start, end = end, end + _bytes([(name, shape)], dtype)
        header[name] = {"dtype": label, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name, shape in tensors:
        _write_noise(file, noise, starts[name], int(np.prod(shape)))


def _write_noise(file: BinaryIO, noise: npt.NDArray[Any], start: int, count: int) -> None:
    while count:
        piece = noise[start : start + count]
        file.write(piece.data)
        count, start = count - len(piece), 0


def _bytes(tensors: Tensors, dtype: str) -> int:
    return sum(int(np.prod(shape)) for _, shape in tensors) * _itemsize(dtype)


def _itemsize(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def main() -> None:
    """The command line of this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gigabytes", type=float, default=3.0)
    parser.add_argument("--family", choices=("olmoe", "qwen3_moe"), default="olmoe")
    options = parser.parse_args()
    shape = of_size(int(options.gigabytes * 10**9), options.family)
    make_checkpoint(options.out, shape)
    print(f"{shape}: {_bytes(shape.tensors(), shape.dtype)} bytes")


if __name__ == "__main__":
    main()

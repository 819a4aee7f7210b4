"""Switch modules of every kind that a store can hold, and layers made resident from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_map
from mlx_lm.models.activations import SwigluOAI
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from expert_network.experts.mlx_backend import ResidentLayer
from expert_network.model.seam import expert_tensors
from expert_network.store.manifest import LayerSpec, lay_out

EXPERTS, HIDDEN, WIDTH = 12, 64, 96


@dataclass(frozen=True)
class Kind:
    """How the experts of a layer are stored and what they do with a row."""

    name: str
    dtype: mx.Dtype = mx.float32
    quantization: tuple[str, int, int] | None = None  # mode, bits, group size
    global_scale: bool = False
    bias: bool = False
    make: Callable[..., Any] = SwitchGLU
    activation: Callable[[], Any] | None = None


def _relu2(x: mx.array) -> mx.array:
    return mx.square(mx.maximum(x, 0))


KINDS = [
    Kind("float32"),
    Kind("bfloat16", mx.bfloat16),
    Kind("float16", mx.float16),
    Kind("bfloat16 with biases", mx.bfloat16, bias=True),
    *(Kind(f"affine {bits}", mx.bfloat16, ("affine", bits, 32)) for bits in (2, 3, 4, 6, 8)),
    Kind("affine 4 of float16", mx.float16, ("affine", 4, 32)),
    Kind("affine 4 of float32", mx.float32, ("affine", 4, 32)),
    Kind("affine 4 with biases", mx.bfloat16, ("affine", 4, 32), bias=True),
    Kind("mxfp4", mx.bfloat16, ("mxfp4", 4, 32)),
    Kind("mxfp8", mx.bfloat16, ("mxfp8", 8, 32)),
    Kind("nvfp4", mx.bfloat16, ("nvfp4", 4, 16)),
    Kind("nvfp4, global scale", mx.bfloat16, ("nvfp4", 4, 16), global_scale=True),
    Kind("gpt_oss", mx.bfloat16, ("mxfp4", 4, 32), bias=True, activation=SwigluOAI),
    Kind("nemotron", mx.bfloat16, make=SwitchMLP, activation=lambda: _relu2),
    Kind("nemotron, affine 4", mx.bfloat16, ("affine", 4, 32), False, False, SwitchMLP),
]


def switch_of(kind: Kind, width: int = WIDTH) -> Any:
    """A switch module of random weights."""
    mx.random.seed(3)
    options = {} if kind.activation is None else {"activation": kind.activation()}
    switch = kind.make(HIDDEN, width, EXPERTS, bias=kind.bias, **options)
    switch.update(tree_map(lambda p: mx.random.normal(p.shape) * 0.2, switch.parameters()))
    switch.set_dtype(kind.dtype)
    if kind.quantization is not None:
        mode, bits, group_size = kind.quantization
        extra = {"global_scale": True} if kind.global_scale else {}

        def chosen(_: str, module: Any) -> Any:
            settings = {"group_size": group_size, "bits": bits, "mode": mode, **extra}
            return settings if hasattr(module, "to_quantized") else False

        quantize(switch, group_size, bits, mode=mode, class_predicate=chosen)
    mx.eval(switch.parameters())
    return switch


def spec_of(switch: Any, layer: int = 5) -> LayerSpec:
    """What a manifest would say of the module, without the sha256."""
    named = expert_tensors(switch).items()
    tensors, block_bytes = lay_out(
        [(n, str(a.dtype).removeprefix("mlx.core."), tuple(a.shape[1:])) for n, a in named]
    )
    return LayerSpec(layer, "x", EXPERTS, HIDDEN, tensors, block_bytes, block_bytes, ())


def blocks_of(switch: Any) -> list[bytes]:
    """The bytes of every block, as a store would have them."""
    spec, tensors, blocks = spec_of(switch), expert_tensors(switch), []
    for expert in range(spec.experts):
        block = np.zeros(spec.block_bytes, np.uint8)
        for tensor in spec.tensors:
            one = mx.contiguous(tensors[tensor.name][expert : expert + 1]).flatten()
            block[tensor.offset : tensor.offset + tensor.nbytes] = np.array(one.view(mx.uint8))
        blocks.append(block.tobytes())
    return blocks


def resident(kind: Kind, ids: Sequence[int], in_place: bool = True) -> ResidentLayer:
    """Some experts of switch_of(kind), read from their blocks."""
    switch = switch_of(kind)
    spec, blocks = spec_of(switch), blocks_of(switch)

    def read(expert: int, pieces: Sequence[memoryview]) -> None:
        start = 0
        for piece in pieces:
            piece[:] = blocks[expert][start : start + len(piece)]
            start += len(piece)

    return ResidentLayer(spec, switch, np.array(sorted(ids)), read, in_place)


def as_float32(kind: Kind) -> Any:
    """switch_of(kind) with all that is half precision cast to float32, computed by MLX alone.

    MLX on CPU has no global scales; the experts' matrices are then taken apart into float32.
    """
    switch = switch_of(kind)
    if kind.global_scale:
        return _dequantized(switch)
    half = (mx.bfloat16, mx.float16)
    cast_up = tree_map(
        lambda p: p.astype(mx.float32) if p.dtype in half else p, switch.parameters()
    )
    switch.update(cast_up)
    return switch


def _dequantized(quantized: Any) -> Any:
    switch = SwitchGLU(HIDDEN, WIDTH, EXPERTS)
    for name in ("gate_proj", "up_proj", "down_proj"):
        part = quantized[name]
        switch[name].weight = mx.stack(
            [
                mx.dequantize(
                    part.weight[expert],
                    part.scales[expert],
                    group_size=part.group_size,
                    bits=part.bits,
                    mode=part.mode,
                    global_scale=part.global_scale[expert],
                    dtype=mx.float32,
                )
                for expert in range(EXPERTS)
            ]
        )
    return switch


def rows(count: int, seed: int = 1) -> mx.array:
    """Random rows (count, HIDDEN)."""
    values = np.random.default_rng(seed).standard_normal((count, HIDDEN), dtype=np.float32)
    return mx.array(values)


def array(values: mx.array) -> npt.NDArray[np.float32]:
    """For comparing."""
    return cast("npt.NDArray[np.float32]", np.array(values.astype(mx.float32)))

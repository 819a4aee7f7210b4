"""Compute a model's figures from its architecture: mlx-lm builds it lazily, we add up the shapes.

`python -m tests.support.model_figures` prints catalog.toml's numbers anew, from
tests/driver/model_configs.json: the fields of each model's own config.json that mlx-lm reads.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model

from expert_network.model.checkpoint import model_classes
from expert_network.model.seam import find_switches
from expert_network.store.manifest import ALIGNMENT, align, lay_out

CONFIGS = Path(__file__).parents[1] / "driver" / "model_configs.json"


def figures(config: dict[str, Any]) -> dict[str, Any]:
    """The numbers of one catalog entry, for the quantization in which it is downloaded."""
    config = copy.deepcopy(config)
    classes: tuple[Any, Any] = model_classes(config)
    model = classes[0](classes[1].from_dict(config))
    total = sum(array.size for array in _arrays(model).values())
    sites = find_switches(model)
    experts = sites[0].module["gate_proj"].num_experts
    per_token = _per_token(config)
    routed = sum(array.size for site in sites for array in _arrays(site.module).values())
    model.set_dtype(mx.bfloat16)
    bits = _quantize(model, config)
    sites = find_switches(model)
    block_bytes = [_block_bytes(site.module) for site in sites]
    everything = sum(array.nbytes for array in _arrays(model).values())
    stored = sum(array.nbytes for site in sites for array in _arrays(site.module).values())
    trunk_bytes = everything - stored
    padded = sum(experts * align(count, ALIGNMENT) for count in block_bytes)
    return {
        "model_type": config["model_type"],
        "total_params": total,
        "active_params": total - routed + routed * per_token // experts,
        "layers": len(sites),
        "experts": experts,
        "per_token": per_token,
        "block_bytes": max(block_bytes),
        "trunk_bytes": trunk_bytes,
        "disk_bytes": trunk_bytes + padded,
        "bits": bits,
    }


def _quantize(model: Any, config: dict[str, Any]) -> str:
    """4 bits in groups of 64, with 8-bit routers where the family asks for them.

    gpt-oss comes with its experts in mxfp4; its 8-bit trunk is what mlx-community's repos have.
    """

    def gpt_oss(path: str, module: Any) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized"):
            return False
        return "experts" in path or {"group_size": 64, "bits": 8, "mode": "affine"}

    with contextlib.redirect_stdout(io.StringIO()):
        if config["model_type"] == "gpt_oss":
            quantize_model(model, config, 32, 4, mode="mxfp4", quant_predicate=gpt_oss)
            return "mxfp4, trunk 8"
        quantize_model(model, config, 64, 4)
        return "4"


def _per_token(config: dict[str, Any]) -> int:
    text = config.get("text_config", config)
    return int(text.get("num_experts_per_tok") or text["top_k_experts"])


def _block_bytes(module: Any) -> int:
    layout = [
        (name, str(array.dtype).removeprefix("mlx.core."), tuple(array.shape[1:]))
        for name, array in _arrays(module).items()
    ]
    return lay_out(layout)[1]


def _arrays(module: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(module.parameters()))


def main() -> None:
    """The command line of this file."""
    for name, config in json.loads(CONFIGS.read_text()).items():
        print(f'\n[[model]]\nname = "{name}"')
        for key, value in figures(config).items():
            print(f"{key} = {value:_}" if isinstance(value, int) else f'{key} = "{value}"')


if __name__ == "__main__":
    main()

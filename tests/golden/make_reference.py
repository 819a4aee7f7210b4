"""Make tiny checkpoints of more families, with the logits that the transformers library computes.

python tests/golden/make_reference.py [FAMILY ...]      needs the extra `golden` (torch)

Each becomes tests/golden/FAMILY: config.json and model.safetensors as transformers saves them, and
reference.npz with input_ids (2, 24) int64 and logits (2, 24, vocabulary) float32.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

HERE = Path(__file__).parent
SPREAD = 0.08  # of the random weights: at transformers' 0.02 the experts hardly move the logits

COMMON = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

# What a family has that the others do not stands in its line's comment.
FAMILIES: dict[str, dict[str, Any]] = {
    # a shared expert behind a gate, biases on q, k and v; mlx-lm's default base is another
    "qwen2_moe": {
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 96,
        "num_experts": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    # half of each head is rotated; groups, a dense first layer, a correction bias
    "glm4_moe": {
        "head_dim": 16,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 3,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 20000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    # MXFP4 experts with bias vectors, clipped SwiGLU, attention sinks, sliding windows, YaRN
    "gpt_oss": {
        "head_dim": 16,
        "intermediate_size": 64,
        "num_local_experts": 8,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
    },
    # fused expert matrices, four multipliers, a tied head
    "granitemoe": {
        "intermediate_size": 64,
        "num_local_experts": 8,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
    },
    # linear attention beside full attention, a quarter of each head is rotated
    "qwen3_next": {
        "num_hidden_layers": 4,
        "head_dim": 32,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "num_experts": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 20000.0,
            "partial_rotary_factor": 0.25,
        },
    },
}


def main(families: list[str]) -> None:
    for family in families or FAMILIES:
        make(family, HERE / family)


def make(family: str, out: Path) -> None:
    """Write one family's folder."""
    config = CONFIG_MAPPING[family](**(COMMON | FAMILIES[family]), dtype="float32")
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            spread(name, tensor)
        packed = pack_experts(model) if family == "gpt_oss" else {}
        ids = np.random.default_rng(0).integers(10, 252, (2, 24))
        logits = model(torch.from_numpy(ids)).logits
    model.save_pretrained(out)
    (out / "generation_config.json").unlink(missing_ok=True)
    if packed:
        save_packed(out, packed)
    (out / "model.safetensors").chmod(0o644)
    np.savez(out / "reference.npz", input_ids=ids, logits=logits.numpy())
    size = (out / "model.safetensors").stat().st_size
    print(f"{family}: {size / 1e6:.1f} MB, logits of standard deviation {logits.std():.2f}")


def spread(name: str, tensor: torch.Tensor) -> None:
    """Random values in which a weight that is dropped or misplaced shows."""
    if "inv_freq" in name:
        return
    if "norm" in name:
        tensor.add_(torch.randn_like(tensor) * SPREAD)
    elif "A_log" not in name and "dt_bias" not in name:
        tensor.normal_(0.0, SPREAD)


# --- MXFP4, the form in which gpt_oss is published: mlx-lm reads no other

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def pack_experts(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Round the experts' matrices to MXFP4, in place; their blocks and scales by name."""
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in model.named_parameters():
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            blocks, scales, rounded = to_mxfp4(tensor.transpose(1, 2))
            tensor.copy_(rounded.transpose(1, 2))
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return packed


def to_mxfp4(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks (..., groups, 16) of two 4-bit values a byte, scales (..., groups), the values."""
    groups = matrix.unflatten(-1, (-1, 32))
    exponent = groups.abs().amax(-1, keepdim=True).log2().floor() - 2  # 6 is the largest value
    scaled = groups / exponent.exp2()
    codes = (scaled.abs()[..., None] - E2M1).abs().argmin(-1)
    rounded = E2M1[codes] * scaled.sign() * exponent.exp2()
    codes = (codes + 8 * (scaled < 0)).to(torch.uint8)
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    return blocks.contiguous(), (exponent[..., 0] + 127).to(torch.uint8), rounded.flatten(-2)


def save_packed(out: Path, packed: dict[str, torch.Tensor]) -> None:
    """Put blocks and scales in the place of the matrices that transformers saved."""
    tensors = load_file(out / "model.safetensors")
    names = {name.rpartition("_")[0] for name in packed}
    kept = {name: tensor for name, tensor in tensors.items() if name not in names}
    save_file(kept | packed, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

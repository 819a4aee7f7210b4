"""What a checkpoint's config says, in the words that mlx-lm reads. Pure functions.

transformers 5 nests and renames what older releases wrote at the top: rope settings go under
`rope_parameters`, numbers that layers differ in become lists by layer, names are unified over the
families. mlx-lm follows for some families; for others it refuses the config, or takes a default
in silence and computes something else. What a config says outside of these stays as it is.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from expert_network.model.family_configs import fill_constants, fill_derived

Config = dict[str, Any]

# Keys that name Python code inside the checkpoint.
CODE_KEYS = ("auto_map", "model_file")

# Where the settings of the language model in a larger one stand.
_INNER = ("text_config", "llm_config", "language_config")

# Names of one setting: what is absent is filled in from what is there.
_ALIASES = (
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k"),
    ("n_group", "num_expert_group"),
    ("norm_topk_prob", "moe_renormalize", "norm_expert_weight"),
    ("num_key_value_heads", "num_attention_groups"),
    ("rms_norm_eps", "layernorm_epsilon"),
    ("max_position_embeddings", "model_max_length"),
    ("dtype", "torch_dtype"),
)

# Rope settings that have a name of their own at the top.
_ROPE = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")

# The group size and bits that MLX takes for null, by mode.
_QUANTIZATION = {"affine": (64, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}


# No config is nested so deeply; one that is would end what reads it in a RecursionError.
MAX_DEPTH = 64


def too_deep(config: object) -> bool:
    """Whether lists and tables are nested more than MAX_DEPTH deep."""
    level = [config]
    for _ in range(MAX_DEPTH):
        level = [item for outer in level for item in _inside(outer)]
        if not level:
            return False
    return True


def _inside(value: object) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def code_entry(config: object) -> str | None:
    """The first entry, at any depth, that asks to run code from the checkpoint."""
    if isinstance(config, list):
        return next((found for item in config if (found := code_entry(item))), None)
    if not isinstance(config, dict):
        return None
    for key in CODE_KEYS:
        if config.get(key):
            return key
    return next((found for item in config.values() if (found := code_entry(item))), None)


def normalise_config(config: Config) -> Config:
    """A copy of `config` with everything where mlx-lm looks for it. Idempotent."""
    config = deepcopy(config)
    fill_constants(config)
    for key in _INNER:
        if isinstance(inner := config.get(key), dict):
            config[key] = normalise_config(inner)
            # A family that wraps a language model reads one of these outside, the other inside.
            _fill(config, "vocab_size", inner.get("vocab_size"))
            if "rope_parameters" in inner and "tie_word_embeddings" in config:
                config[key]["tie_word_embeddings"] = config["tie_word_embeddings"]
    _lift_rope(config)
    for names in _ALIASES:
        known = next((config[name] for name in names if config.get(name) is not None), None)
        for name in names:
            _fill(config, name, known)
    _lift_layers(config)
    _fill_head_dim(config)
    _fill_quantization(config)
    fill_derived(config)
    return config


def _fill(config: Config, key: str, value: Any) -> None:
    if config.get(key) is None and value is not None:
        config[key] = value


def _lift_rope(config: Config) -> None:
    """Copy what `rope_parameters` says to the top, and make rope_scaling of it.

    It outweighs what stands there, as it does in transformers. Where it differs by kind of layer,
    the top gets what full attention has, unless it has a value of its own.
    """
    rope = config.get("rope_parameters")
    if isinstance(rope, dict):
        one = rope.get("full_attention", rope)
        for key in _ROPE:
            if one is rope and one.get(key) is not None:
                config[key] = one[key]
            _fill(config, key, one.get(key))
        if config.get("rope_scaling") is None:
            config["rope_scaling"] = dict(one) if _kind(one) != "default" else None
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict):  # some families look for one name, some for the other
        _fill(scaling, "type", scaling.get("rope_type"))
        _fill(scaling, "rope_type", scaling.get("type"))


def _kind(rope: Config) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _lift_layers(config: Config) -> None:
    """Say with one number what a list by layer says, for the families that read the number."""
    if mlp := config.get("mlp_layer_types"):
        dense = next((n for n, kind in enumerate(mlp) if kind != "dense"), len(mlp))
        _fill(config, "first_k_dense_replace", dense)
        _fill(config, "is_moe_layer", [kind == "sparse" for kind in mlp])
    layers = config.get("layer_types") or []
    if "linear_attention" in layers and "full_attention" in layers:
        _fill(config, "full_attention_interval", layers.index("full_attention") + 1)


def _fill_head_dim(config: Config) -> None:
    """Absent or null, it is the hidden size over the heads; latent attention has others."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if hidden and heads and not config.get("kv_lora_rank"):
        _fill(config, "head_dim", hidden // heads)


def _fill_quantization(config: Config) -> None:
    """Write out the nulls that mlx-lm's mixed recipes leave in the entries of single modules.

    What is filled in is what MLX took when it quantized them, which need not be what stands at the
    top: that group size is for the modules without an entry.
    """
    for key in ("quantization", "quantization_config"):
        top = config.get(key)
        for entry in top.values() if isinstance(top, dict) else ():
            if isinstance(entry, dict) and None in entry.values():
                mode = entry.get("mode") or "affine"
                group_size, bits = _QUANTIZATION.get(str(mode), (None, None))
                for name, value in (("mode", mode), ("group_size", group_size), ("bits", bits)):
                    if name in entry:
                        _fill(entry, name, value)

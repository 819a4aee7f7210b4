"""expert_network.model.config and family_configs"""

from __future__ import annotations

import importlib
import inspect
import json
import warnings
from copy import deepcopy
from typing import Any

import pytest
from mlx_lm.utils import MODEL_REMAPPING, _get_classes

from expert_network.backend import detect
from expert_network.model.config import code_entry, normalise_config
from tests.network import families

detect()

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import CONFIG_MAPPING

Config = dict[str, Any]

ALIASES = [name for name, family in MODEL_REMAPPING.items() if family in families.families()]
# These two wrap any language model, by default a dense one.
WRAPPERS = {"llava", "mistral3"}
SHARED = sorted({*families.families(), *ALIASES} & set(CONFIG_MAPPING.keys()) - WRAPPERS)
THETA = 12345.0


def saved(model_type: str) -> Config:
    """What transformers writes into config.json, with rope bases that are nobody's default."""
    config = CONFIG_MAPPING[model_type]()
    dump = json.loads(json.dumps(config.to_dict(), default=str))
    # As save_pretrained does: it is mlx-lm's way to tell two models of one type apart.
    dump["architectures"] = [type(config).__name__.replace("Config", "ForCausalLM")]
    for level in levels(dump):
        for number, rope in enumerate(ropes(level)):
            rope["rope_theta"] = THETA + number
        for key in ("rope_theta", "partial_rotary_factor", "rope_scaling"):
            level.pop(key, None)
    return dict(dump)


def levels(config: Config) -> list[Config]:
    """The config and the language model's inside it."""
    inner = config.get("text_config")
    return [config, inner] if isinstance(inner, dict) else [config]


def ropes(level: Config) -> list[Config]:
    """The rope settings of a level, full attention's first."""
    rope = level.get("rope_parameters") or {}
    if "full_attention" in rope:
        return [rope["full_attention"], *(r for k, r in rope.items() if k != "full_attention")]
    return [rope] if "rope_theta" in rope else []


def has_one_rope(model_type: str) -> bool:
    """Whether all layers of the language model share one rope."""
    return "rope_theta" in (levels(saved(model_type))[-1].get("rope_parameters") or {})


def text_args(model_type: str, config: Config) -> Any:
    """The ModelArgs of the language model that mlx-lm would build from `config`."""
    _, args_class = _get_classes(config)
    args = args_class.from_dict(config)
    inner = getattr(args, "text", None) or getattr(args, "text_config", args)
    if not isinstance(inner, dict):
        return inner
    family = MODEL_REMAPPING.get(model_type, model_type)
    module, name = families.TEXT_CLASS[family]
    return getattr(importlib.import_module(f"mlx_lm.models.{module}"), name).from_dict(inner)


def test_many_families_are_in_both_libraries() -> None:
    """The tests below are about nearly all families, not about a few."""
    assert len(SHARED) >= 38


@pytest.mark.parametrize("model_type", SHARED)
def test_what_transformers_saves_is_understood(model_type: str) -> None:
    """No top-level rope key, renamed counts: mlx-lm gets every field, and the same rope."""
    config = saved(model_type)
    if model_type == "lfm2_moe":  # its default config has no layers at all
        config["layer_types"] = ["conv", "full_attention"]
    args = text_args(model_type, normalise_config(config))
    rope = next((r for level in levels(config) for r in ropes(level)), {})
    if rope and hasattr(args, "rope_theta"):
        assert args.rope_theta == rope["rope_theta"]
    factor = rope.get("partial_rotary_factor")
    if factor is not None and hasattr(args, "partial_rotary_factor"):
        assert args.partial_rotary_factor == factor
    if rope.get("rope_type", "default") != "default" and hasattr(args, "rope_scaling"):
        assert args.rope_scaling["factor"] == rope["factor"]


@pytest.mark.parametrize("model_type", [name for name in SHARED if has_one_rope(name)])
def test_scaling_reaches_mlx_lm_under_both_names_of_its_type(model_type: str) -> None:
    """A rope_type other than the default becomes rope_scaling, for families that read one."""
    config = saved(model_type)
    rope = levels(config)[-1]["rope_parameters"]
    rope |= {"rope_type": "linear", "factor": 8.0}
    rope.pop("type", None)
    scaling = levels(normalise_config(config))[-1]["rope_scaling"]
    assert scaling["type"] == scaling["rope_type"] == "linear"
    assert scaling["factor"] == 8.0


@pytest.mark.parametrize("model_type", SHARED)
def test_normalising_twice_is_normalising_once(model_type: str) -> None:
    """A store keeps the normalised config, and opening it normalises again."""
    once = normalise_config(saved(model_type))
    assert normalise_config(once) == once


@pytest.mark.parametrize("model_type", SHARED)
def test_the_given_config_is_left_alone(model_type: str) -> None:
    """normalise_config is pure."""
    config = saved(model_type)
    before = deepcopy(config)
    normalise_config(config)
    assert config == before


@pytest.mark.parametrize("family", families.families())
def test_a_config_in_mlx_lms_own_words_keeps_its_meaning(family: str) -> None:
    """Every field of mlx-lm's ModelArgs that the config sets reads as before."""
    config = families.config(family)
    normal = normalise_config(config)
    _, args_class = _get_classes(config)
    for name in inspect.signature(args_class).parameters:
        if config.get(name) is not None and not isinstance(config[name], dict):
            assert normal[name] == config[name], name


def test_rope_parameters_outweigh_a_stale_key_at_the_top() -> None:
    """transformers reads the nested value; so do we."""
    rope = {"rope_theta": 5.0, "rope_type": "default"}
    assert normalise_config({"rope_theta": 1.0, "rope_parameters": rope})["rope_theta"] == 5.0


def test_an_older_config_keeps_its_rope() -> None:
    """Without rope_parameters nothing at the top is touched."""
    scaling = {"type": "yarn", "factor": 4.0}
    normal = normalise_config({"rope_theta": 7.0, "rope_scaling": scaling})
    assert normal["rope_theta"] == 7.0
    assert normal["rope_scaling"] == {**scaling, "rope_type": "yarn"}


def test_no_scaling_is_said_as_null() -> None:
    """Families that require the key get it; those that look for a type find none."""
    normal = normalise_config({"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}})
    assert normal["rope_scaling"] is None


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        ({"num_local_experts": 8}, "num_experts", 8),
        ({"num_experts": 8}, "num_local_experts", 8),
        ({"n_routed_experts": 8, "num_experts": 4}, "num_experts", 4),
        ({"num_experts_per_token": 2}, "num_experts_per_tok", 2),
        ({"dtype": "bfloat16"}, "torch_dtype", "bfloat16"),
        ({"torch_dtype": "float16"}, "dtype", "float16"),
        ({"hidden_size": 64, "num_attention_heads": 4, "head_dim": None}, "head_dim", 16),
        ({"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}, "head_dim", 32),
        ({"mlp_layer_types": ["dense", "dense", "sparse"]}, "first_k_dense_replace", 2),
        ({"mlp_layer_types": ["dense", "sparse"]}, "is_moe_layer", [False, True]),
        (
            {"layer_types": ["linear_attention"] * 3 + ["full_attention"]},
            "full_attention_interval",
            4,
        ),
        ({"text_config": {"vocab_size": 5}}, "vocab_size", 5),
    ],
)
def test_a_setting_is_found_under_its_other_name(given: Config, key: str, value: Any) -> None:
    """Renamed counts, lists by layer and nulls end up where mlx-lm looks."""
    assert normalise_config(given)[key] == value


def test_latent_attention_gets_no_head_dim_of_that_kind() -> None:
    """Where keys are compressed, hidden size over heads is nobody's head size."""
    config = {"hidden_size": 64, "num_attention_heads": 4, "kv_lora_rank": 8}
    assert "head_dim" not in normalise_config(config)


@pytest.mark.parametrize(
    ("config", "entry"),
    [
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        ({"model_file": "x.py"}, "model_file"),
        ({"text_config": {"auto_map": {"a": "b"}}}, "auto_map"),
        ({"parts": [{"deep": [{"model_file": "x.py"}]}]}, "model_file"),
        ({"auto_map": None, "model_file": ""}, None),
        ({"model_type": "olmoe"}, None),
    ],
)
def test_code_is_found_at_any_depth(config: Config, entry: str | None) -> None:
    """An entry that names code is named; an empty one is not one."""
    assert code_entry(config) == entry

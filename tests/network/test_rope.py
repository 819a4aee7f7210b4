"""expert_network.model.rope"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE
from mlx_lm.models.rope_utils import Llama3RoPE, YarnRoPE

from expert_network.backend import detect
from expert_network.model.checkpoint import model_classes
from tests.network import families

detect()

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 64}


def ropes(family: str, **rope: Any) -> list[Module]:
    """The rope modules of a tiny model with these rope settings."""
    config = families.config(family)
    config.pop("rope_scaling", None)
    config["rope_parameters"] = {"rope_theta": 20000.0, "rope_type": "default"} | rope
    classes: Any = model_classes(config)
    model = classes[0](classes[1].from_dict(config))
    return [m for _, m in model.named_modules() if "rope" in type(m).__name__.lower()]


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "mixtral", "olmoe"])
@pytest.mark.parametrize(("rope", "kind"), [(YARN, YarnRoPE), (LLAMA3, Llama3RoPE)])
def test_scaling_is_done_whether_or_not_mlx_lm_does_it(
    family: str, rope: dict[str, Any], kind: type
) -> None:
    """Every rope of the model is of the kind that the config asks for."""
    found = ropes(family, **rope)
    assert len(found) == families.LAYERS
    assert all(type(module) is kind for module in found)


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe"])
def test_without_scaling_nothing_is_replaced(family: str) -> None:
    """The model is mlx-lm's own, of its own class."""
    config = families.config(family)
    assert model_classes(config)[0].__module__ == f"mlx_lm.models.{family}"
    assert all(type(module) is RoPE for module in ropes(family))


def test_partial_rotation_survives() -> None:
    """A replaced rope turns as many dimensions as the plain one did."""
    assert {module.dims for module in ropes("glm4_moe", partial_rotary_factor=0.5, **YARN)} == {8}


def test_yarn_without_rounding_differs_and_with_it_is_mlx_lms() -> None:
    """Truncate false keeps the ends of the ramp where they fall between two dimensions."""
    (rounded, *_), (exact, *_) = ropes("gpt_oss", **YARN), ropes("gpt_oss", truncate=False, **YARN)
    assert rounded._freqs.shape == exact._freqs.shape
    assert not mx.allclose(rounded._freqs, exact._freqs)
    assert mx.array_equal(rounded._freqs[0], exact._freqs[0])
    assert mx.allclose(rounded._freqs[-1], exact._freqs[-1])

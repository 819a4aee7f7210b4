"""expert_network.model.structure"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import olmoe

from expert_network.backend import detect
from expert_network.errors import StoreError
from expert_network.model import structure
from expert_network.model.seam import find_switches
from expert_network.store.manifest import LayerSpec, Manifest, lay_out
from expert_network.store.reader import Store
from tests.network import families, family_runs

detect()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A tiny olmoe's trunk and manifest."""
    return family_runs.save_trunk("olmoe", tmp_path)[0]


def trunk(store: Store) -> dict[str, mx.array]:
    """The trunk's tensors, read."""
    tensors: dict[str, mx.array] = mx.load(str(store.trunk_path))  # type: ignore[assignment]
    mx.eval(tensors)
    return tensors


def rewrite(store: Store, tensors: dict[str, mx.array]) -> None:
    """Give the store another trunk."""
    mx.save_safetensors(str(store.trunk_path), tensors)


def set_config(store: Store, **entries: Any) -> None:
    """Change entries of the store's config."""
    file = store.path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def test_the_model_is_mlx_lms_own(store: Store) -> None:
    """Its class is the family's, and its expert layers stand where the manifest says."""
    model = structure.build(store)
    assert type(model) is olmoe.Model
    found = [(site.layer, site.path) for site in find_switches(model)]
    assert found == [(spec.layer, spec.path) for spec in store.manifest.layers]


def test_the_trunk_is_the_stores(store: Store) -> None:
    """Every tensor of the trunk file is in the model, bit by bit."""
    model: Any = structure.build(store)
    parameters: Any = tree_flatten(model.parameters(), destination={})
    for name, array in trunk(store).items():
        assert mx.array_equal(parameters[name], array), name


def test_experts_take_no_memory(tmp_path: Path) -> None:
    """A model with 1.6 GB of experts is built, and its trunk evaluated, in under 30 MB."""
    config = families.config("olmoe") | {
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "intermediate_size": 4096,
        "num_experts": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    args: Any = olmoe.ModelArgs
    whole: Any = olmoe.Model(args.from_dict(config))
    parameters: Any = tree_flatten(whole.parameters(), destination={})
    rewrite_to = {name: a for name, a in parameters.items() if ".switch_mlp." not in name}
    mx.save_safetensors(str(tmp_path / "trunk.safetensors"), rewrite_to)
    del whole, parameters, rewrite_to
    tensors = [(f"{p}_proj.weight", "float32", (4096, 256)) for p in ("gate", "up")]
    specs, size = lay_out([*tensors, ("down_proj.weight", "float32", (256, 4096))])
    layers = [
        LayerSpec(n, f"model.layers.{n}.mlp.switch_mlp", 64, 256, specs, size, size, ())
        for n in (0, 1)
    ]
    manifest = Manifest("olmoe", "float32", tuple(layers), {})
    assert manifest.block_bytes > 1_600_000_000
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    model: Any = structure.build(Store(tmp_path, manifest, config, has_blocks=False))
    for site in find_switches(model):
        site.module.clear()
    mx.eval(model.parameters())
    assert mx.get_peak_memory() - before < 30_000_000


def test_a_missing_tensor_is_named(store: Store) -> None:
    """mlx-lm's own lenient loading would leave it random in silence."""
    tensors = trunk(store)
    tensors.pop("model.norm.weight")
    rewrite(store, tensors)
    with pytest.raises(StoreError, match=r"1 tensors are missing: model\.norm\.weight"):
        structure.build(store)


def test_a_left_over_tensor_is_named(store: Store) -> None:
    """A tensor that the model has no place for is not dropped in silence."""
    rewrite(store, trunk(store) | {"model.extra": mx.ones((2,))})
    with pytest.raises(StoreError, match=r"1 tensors are left over: model\.extra"):
        structure.build(store)


def test_a_tensor_of_another_shape_is_named(store: Store) -> None:
    """So is one that fits by name only."""
    rewrite(store, trunk(store) | {"model.norm.weight": mx.ones((2,))})
    with pytest.raises(StoreError, match=r"1 tensors are of another shape: model\.norm\.weight"):
        structure.build(store)


def test_experts_that_the_manifest_lacks_are_named(store: Store) -> None:
    """A layer of experts that no block belongs to is missing like any tensor."""
    manifest = Manifest("olmoe", "float32", store.manifest.layers[1:], {})
    with pytest.raises(StoreError, match=r"missing: model\.layers\.0\.mlp\.switch_mlp"):
        structure.build(Store(store.path, manifest, store.config, has_blocks=False))


def test_a_trunk_that_is_no_safetensors_file_is_refused(store: Store) -> None:
    """The sentence names the file."""
    store.trunk_path.write_bytes(b"\x00" * 64)
    with pytest.raises(StoreError, match=r"trunk\.safetensors: it cannot be read"):
        structure.build(store)


@pytest.mark.parametrize(
    "entries", [{"num_attention_heads": None}, {"model_type": "nonsense"}, {"hidden_size": "64"}]
)
def test_a_config_that_mlx_lm_refuses_is_a_sentence(store: Store, entries: dict[str, Any]) -> None:
    """Whatever mlx-lm raises becomes a StoreError on one line."""
    set_config(store, **entries)
    with pytest.raises(StoreError) as caught:
        structure.build(store)
    assert "mlx-lm cannot build this model" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tied_head_stays_tied(tmp_path: Path) -> None:
    """A store whose head is its embedding has no tensor for it, and its model no head."""
    store, _ = family_runs.save_trunk("qwen3_moe", tmp_path)
    tensors = trunk(store)
    tensors.pop("lm_head.weight")
    rewrite(store, tensors)
    set_config(store, tie_word_embeddings=True)
    model: Any = structure.build(store)
    assert "lm_head" not in model

"""From checkpoints to stores: every weight arrives, the digest is the same, a crash is no loss."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.convert import mixed_quant_predicate_builder
from mlx_lm.utils import load_model, quantize_model, save_config, save_model

from expert_network.errors import CheckpointError, DiskFull, StoreError
from expert_network.model.checkpoint import open_checkpoint
from expert_network.store.convert import preprocess
from expert_network.store.manifest import CONFIG
from expert_network.store.reader import Store
from tests.network import family_runs
from tests.support.converting import converting, go_on, line
from tests.support.mxfp4 import write_gpt_oss
from tests.support.small_disk import small_disk
from tests.support.synthetic import Shape, add_tokenizer, make_checkpoint

GOLDEN = Path(__file__).parents[1] / "golden"
FAMILIES = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))
SMALL = Shape("qwen3_moe", layers=3, experts=8, hidden=64, intermediate=96)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "checkpoint", SMALL)


def stored(store: Store) -> Iterator[tuple[str, bytes]]:
    """Every tensor of a store as (name in the model, bytes): stacks are put together again."""
    for spec in store.manifest.layers:
        blocks = [store.read_block(spec.layer, expert) for expert in range(spec.experts)]
        for tensor in spec.tensors:
            part = slice(tensor.offset, tensor.offset + tensor.nbytes)
            yield f"{spec.path}.{tensor.name}", b"".join(block[part] for block in blocks)
    arrays: Any = mx.load(str(store.trunk_path))
    for name, array in arrays.items():
        yield name, raw(array)


def raw(array: mx.array) -> bytes:
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array).tobytes()


def parameters(model: Any) -> dict[str, bytes]:
    arrays: Any = tree_flatten(model.parameters(), destination={})
    return {name: raw(array) for name, array in arrays.items()}


def finished_layers(folder: Path) -> dict[str, int]:
    """The layer files below a folder and when each was written, in nanoseconds."""
    return {path.name: path.stat().st_mtime_ns for path in folder.rglob("*.bin")}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_arrives(tmp_path: Path, family: str) -> None:
    """A store holds the weights of mlx-lm's model, bit for bit, and nothing else."""
    store = preprocess(GOLDEN / family, tmp_path / "store")
    assert dict(stored(store)) == parameters(open_checkpoint(GOLDEN / family).model)
    assert store.manifest.model_type == family
    assert store.manifest.dtype == "float32"
    assert store.verify() == []


@pytest.mark.parametrize(("bits", "group_size"), [(2, 32), (3, 64), (4, 32), (6, 64), (8, 64)])
def test_quantized_on_the_way(checkpoint: Path, tmp_path: Path, bits: int, group_size: int) -> None:
    """Quantizing layer by layer gives the bits that mlx-lm gives at once, and its config."""
    shape = Shape("qwen3_moe", layers=2, hidden=64, intermediate=128)
    make_checkpoint(checkpoint, shape)
    store = preprocess(checkpoint, tmp_path / "store", bits, group_size)
    source = open_checkpoint(checkpoint)
    model, config = quantize_model(source.model, source.config, group_size, bits)
    assert dict(stored(store)) == parameters(model)
    assert store.config["quantization"] == config["quantization"]
    assert store.config["quantization"]["model.layers.0.mlp.gate"]["bits"] == 8


@pytest.mark.parametrize("mode", ["affine", "mxfp4", "nvfp4"])
def test_a_quantized_checkpoint_stays_as_it_is(tmp_path: Path, mode: str) -> None:
    """What mlx-lm quantized and saved is stored unchanged; quantizing it again is refused."""
    checkpoint = make_checkpoint(tmp_path / "plain", SMALL)
    model, config = load_model(checkpoint, lazy=True)
    model, config = quantize_model(model, config, None, None, mode=mode)
    save_model(tmp_path / "quantized", model)
    save_config(config, tmp_path / "quantized" / CONFIG)
    store = preprocess(tmp_path / "quantized", tmp_path / "store")
    assert dict(stored(store)) == parameters(model)
    assert store.config["quantization"]["mode"] == mode
    with pytest.raises(CheckpointError, match=r"quantized already .*; leave out --bits"):
        preprocess(tmp_path / "quantized", tmp_path / "other", bits=4)
    assert not (tmp_path / "other.partial").exists()


@pytest.mark.parametrize("group_size", [None, 32])
def test_a_mixed_recipe_that_leaves_nulls(tmp_path: Path, group_size: int | None) -> None:
    """mlx-lm's mixed recipes write null for the group size they were not given: it is found."""
    shape = Shape("qwen3_moe", layers=3, experts=8, hidden=64, intermediate=128)
    model, config = load_model(make_checkpoint(tmp_path / "plain", shape), lazy=True)
    recipe: Any = mixed_quant_predicate_builder("mixed_3_6", model, None)  # type: ignore[arg-type]
    model, config = quantize_model(model, config, group_size, 4, quant_predicate=recipe)
    save_model(tmp_path / "mixed", model)
    save_config(config, tmp_path / "mixed" / CONFIG)
    up = "model.layers.1.mlp.switch_mlp.up_proj"
    saved = json.loads((tmp_path / "mixed" / CONFIG).read_text())["quantization"]
    assert saved[up] == {"group_size": None, "bits": 3, "mode": "affine"}
    store = preprocess(tmp_path / "mixed", tmp_path / "store")
    assert dict(stored(store)) == parameters(model)
    assert store.config["quantization"][up] == {"group_size": 64, "bits": 3, "mode": "affine"}
    assert store.config["quantization_config"] == store.config["quantization"]
    assert store.manifest.layers[0].hidden == 64
    ids = mx.array([[1, 2, 3, 4]])
    plain: Any = load_model(tmp_path / "mixed")[0]
    ours: Any = open_checkpoint(tmp_path / "mixed").model
    assert raw(ours(ids)) == raw(plain(ids))


def test_mxfp4_as_it_is_published(tmp_path: Path) -> None:
    """gpt-oss comes in mxfp4 from its makers: no weight changes, and expert biases come along."""
    checkpoint = write_gpt_oss(tmp_path / "checkpoint")
    store = preprocess(checkpoint, tmp_path / "store")
    assert dict(stored(store)) == parameters(open_checkpoint(checkpoint).model)
    assert store.config["quantization"] == {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    assert store.manifest.dtype == "bfloat16"
    tensors = {tensor.name: tensor.dtype for tensor in store.manifest.layers[0].tensors}
    assert tensors["up_proj.weight"] == "uint32"
    assert tensors["up_proj.scales"] == "uint8"
    assert tensors["up_proj.bias"] == "bfloat16"
    with pytest.raises(CheckpointError, match=r"quantized already \(mxfp4, 4 bits\)"):
        preprocess(checkpoint, tmp_path / "other", bits=4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe"])
def test_the_dtype_is_the_checkpoints(tmp_path: Path, family: str, dtype: str) -> None:
    """Weights keep their dtype and the manifest names it, whatever the config claims."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", Shape(family, dtype=dtype))
    config = json.loads((checkpoint / CONFIG).read_text()) | {"torch_dtype": "float64"}
    (checkpoint / CONFIG).write_text(json.dumps(config))
    store = preprocess(checkpoint, tmp_path / "store")
    assert store.manifest.dtype == dtype
    assert {tensor.dtype for tensor in store.manifest.layers[0].tensors} == {dtype}
    assert preprocess(checkpoint, tmp_path / "quantized", 4, 32).manifest.dtype == dtype


def test_the_digest_depends_on_the_model_alone(tmp_path: Path) -> None:
    """One file or many, in another order and folder, in another process: the same digest."""
    single = make_checkpoint(tmp_path / "single", SMALL)
    sharded = make_checkpoint(tmp_path / "else" / "x", SMALL, shard_bytes=50_000, shuffle=True)
    config = json.loads((sharded / CONFIG).read_text())
    reversed_config = dict(reversed(config.items())) | {"_name_or_path": "/home/me"}
    (sharded / CONFIG).write_text(json.dumps(reversed_config))
    assert len(list(sharded.glob("*.safetensors"))) > 5
    digest = preprocess(single, tmp_path / "a").digest
    assert preprocess(single, tmp_path / "b").digest == digest
    with converting(sharded, tmp_path / "c") as child:
        assert line(child)[:2] == ["done", digest]
    assert preprocess(single, tmp_path / "d", bits=4, group_size=32).digest != digest


def test_other_weights_give_another_digest(tmp_path: Path) -> None:
    """The digest tells two models of one shape apart."""
    one = make_checkpoint(tmp_path / "one", SMALL, seed=1)
    two = make_checkpoint(tmp_path / "two", SMALL, seed=2)
    assert preprocess(one, tmp_path / "a").digest != preprocess(two, tmp_path / "b").digest


def test_the_tokenizer_comes_along(checkpoint: Path, tmp_path: Path) -> None:
    """Tokenizer, template and generation config are copied; code, weights and prose are not."""
    add_tokenizer(checkpoint)
    wanted = ["merges.txt", "vocab.json", "tokenizer.model", "chat_template.jinja", "x.tiktoken"]
    wanted += ["special_tokens_map.json", "generation_config.json"]
    for name in wanted:
        (checkpoint / name).write_text("{}")
    for name in ["modeling.py", "README.md", "preprocessor_config.json", ".hidden.model"]:
        (checkpoint / name).write_text("{}")
    (checkpoint / "a.model").mkdir()
    warnings: list[str] = []
    store = preprocess(checkpoint, tmp_path / "store", warn=warnings.append)
    assert warnings == []
    assert store.has_tokenizer
    wanted += ["tokenizer.json", "tokenizer_config.json", "config.json", "trunk.safetensors"]
    assert sorted(store.manifest.files) == sorted(wanted)


def test_no_tokenizer_is_a_warning(checkpoint: Path, tmp_path: Path) -> None:
    """A checkpoint without a tokenizer converts all the same, and says so once."""
    warnings: list[str] = []
    assert not preprocess(checkpoint, tmp_path / "store", warn=warnings.append).has_tokenizer
    assert warnings == [
        f"{checkpoint} has no tokenizer: the store works with token ids, not with text."
    ]


def test_experts_that_do_not_divide_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    """Experts that the group size does not divide are named, with one that would do."""
    with pytest.raises(CheckpointError) as caught:
        preprocess(checkpoint, tmp_path / "store", 4, 64)
    assert str(caught.value) == (
        f"{checkpoint}: model.layers.0.mlp.switch_mlp.down_proj has rows of 96, which do not "
        "divide into groups of 64; try --group-size 32."
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


def test_a_trunk_that_does_not_divide_stays_as_it_is(tmp_path: Path) -> None:
    """Matrices of the trunk that cannot be quantized are left, and counted in a warning."""
    shape = Shape("qwen3_moe", layers=2, hidden=128, intermediate=128)
    checkpoint = make_checkpoint(tmp_path / "checkpoint", shape)
    config = json.loads((checkpoint / CONFIG).read_text()) | {"head_dim": 16}
    (checkpoint / CONFIG).write_text(json.dumps(config))
    weights: Any = mx.load(str(checkpoint / "model.safetensors"))
    for name, array in weights.items():
        if "o_proj" in name:
            weights[name] = array[:, :64]
        elif "self_attn" in name:
            weights[name] = array[:16] if "norm" in name else array[:64]
    mx.save_safetensors(str(checkpoint / "model.safetensors"), weights)
    warnings: list[str] = []
    store = preprocess(checkpoint, tmp_path / "store", 4, 128, warn=warnings.append)
    assert warnings[0] == (
        "2 matrices stay unquantized, their rows do not divide into groups of the size in "
        "brackets: model.layers.0.self_attn.o_proj (128), model.layers.1.self_attn.o_proj (128)."
    )
    assert store.verify() == []


def test_a_family_that_asks_for_wider_groups(tmp_path: Path) -> None:
    """qwen3_moe asks for routers in groups of 64: those with rows of 32 stay as they are."""
    shape = Shape("qwen3_moe", layers=1, hidden=32, intermediate=32)
    checkpoint = make_checkpoint(tmp_path / "checkpoint", shape)
    warnings: list[str] = []
    store = preprocess(checkpoint, tmp_path / "store", 4, 32, warn=warnings.append)
    assert warnings[0].endswith("brackets: model.layers.0.mlp.gate (64).")
    names = set(dict(stored(store)))
    assert "model.layers.0.mlp.gate.scales" not in names
    assert {"lm_head.scales", "model.layers.0.mlp.switch_mlp.up_proj.scales"} <= names


def test_what_a_switch_module_holds_beside_the_experts(tmp_path: Path) -> None:
    """A norm that stands among muse_spark's experts is no expert's: it goes into the trunk."""
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    family_runs.save("muse_spark", checkpoint)
    store = preprocess(checkpoint, tmp_path / "store")
    assert dict(stored(store)) == parameters(open_checkpoint(checkpoint).model)
    norm = "mlp.experts.post_expert_norm.weight"
    trunk: Any = mx.load(str(store.trunk_path))
    assert any(name.endswith(norm) for name in trunk)


def test_progress_covers_every_byte(checkpoint: Path, tmp_path: Path) -> None:
    """Progress rises to the bytes of all blocks and the trunk."""
    seen: list[tuple[int, int]] = []
    store = preprocess(
        checkpoint,
        tmp_path / "store",
        progress=lambda done, total, what: seen.append((done, total)),
    )
    arrays: Any = mx.load(str(store.trunk_path))
    total = store.manifest.block_bytes + sum(array.nbytes for array in arrays.values())
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)


def test_a_killed_run_is_gone_on_with(checkpoint: Path, tmp_path: Path) -> None:
    """After SIGKILL nothing is at OUT; the same command keeps what was finished and ends alike."""
    undisturbed = preprocess(checkpoint, tmp_path / "undisturbed").digest
    out, work = tmp_path / "store", tmp_path / "store.partial"
    # In the middle of the second layer.
    with converting(checkpoint, out, stop_at=SMALL.layer_bytes() * 5 // 3) as child:
        assert line(child)[0] == "at"
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    assert not out.exists()
    before = finished_layers(work)
    assert list(before) == ["layer_00.bin"]
    with converting(checkpoint, out) as child:
        assert line(child)[:2] == ["done", undisturbed]
    assert before.items() <= finished_layers(out).items()
    assert not work.exists()
    assert Store.open(out).verify() == []


@pytest.mark.parametrize("damage", ["block", "note"])
def test_a_killed_run_that_was_damaged(checkpoint: Path, tmp_path: Path, damage: str) -> None:
    """A finished layer that changed since, or whose note did, is converted again."""
    undisturbed = preprocess(checkpoint, tmp_path / "undisturbed").digest
    out, work = tmp_path / "store", tmp_path / "store.partial"
    with converting(checkpoint, out, stop_at=SMALL.layer_bytes() * 5 // 3) as child:
        assert line(child)[0] == "at"
    (path,) = work.rglob("*.bin") if damage == "block" else work.glob("*.json")
    data = bytearray(path.read_bytes())
    data[len(data) // 4] ^= 1
    path.write_bytes(data)
    assert preprocess(checkpoint, out).digest == undisturbed
    assert Store.open(out).verify() == []


@pytest.mark.parametrize("change", ["weights", "options"])
def test_a_killed_run_of_something_else_is_not(
    checkpoint: Path, tmp_path: Path, change: str
) -> None:
    """Layers of another source or other options are not taken over."""
    out = tmp_path / "store"
    with converting(checkpoint, out, stop_at=SMALL.layer_bytes() * 5 // 3) as child:
        assert line(child)[0] == "at"
    old = finished_layers(tmp_path / "store.partial")
    quantization = (4, 32) if change == "options" else (None, 64)
    if change == "weights":
        make_checkpoint(checkpoint, SMALL, seed=1)
    digest = preprocess(checkpoint, tmp_path / "other", *quantization).digest
    store = preprocess(checkpoint, out, *quantization)
    assert store.digest == digest
    assert old.items().isdisjoint(finished_layers(out).items())


def test_two_conversions_into_one_place(checkpoint: Path, tmp_path: Path) -> None:
    """The second is told that the first is at work, and the first ends well."""
    with converting(checkpoint, tmp_path / "store", stop_at=1) as child:
        assert line(child)[0] == "at"
        with pytest.raises(StoreError, match="another process is writing this store now"):
            preprocess(checkpoint, tmp_path / "store")
        go_on(child)
        assert line(child)[0] == "done"
    assert Store.open(tmp_path / "store").verify() == []
    with pytest.raises(StoreError, match="a store stands here already"):
        preprocess(checkpoint, tmp_path / "store")


def test_too_small_a_disk_is_told_beforehand(checkpoint: Path, tmp_path: Path) -> None:
    """What will not fit is refused with both sizes, and leaves nothing."""
    with small_disk(tmp_path / "disk", 4_000_000) as disk:
        with pytest.raises(DiskFull, match=r"MB is needed and [34]\.\d MB is free"):
            preprocess(checkpoint, disk / "store")
        assert list(disk.iterdir()) == []


def test_a_disk_that_fills_up_meanwhile(checkpoint: Path, tmp_path: Path) -> None:
    """A disk that others fill is a DiskFull; with room again the same command goes on."""
    digest = preprocess(checkpoint, tmp_path / "undisturbed").digest

    def fill(done: int, total: int, what: str) -> None:
        if done > SMALL.layer_bytes() and not (disk / "ballast").exists():
            (disk / "ballast").write_bytes(bytes(shutil.disk_usage(disk).free - 32768))

    with small_disk(tmp_path / "disk", 12_000_000) as disk:
        with pytest.raises(DiskFull, match="the disk is full"):
            preprocess(checkpoint, disk / "store", progress=fill)
        assert not (disk / "store").exists()
        kept = finished_layers(disk / "store.partial")
        assert list(kept) == ["layer_00.bin"]
        (disk / "ballast").unlink()
        assert preprocess(checkpoint, disk / "store").digest == digest
        assert kept.items() <= finished_layers(disk / "store").items()


@pytest.mark.parametrize("bits", [None, 4])
def test_memory_stays_under_two_layers_and_the_trunk(tmp_path: Path, bits: int | None) -> None:
    """However many layers there are, at most two of them and the trunk are in memory."""
    shape = Shape("olmoe", 6, 16, 4, hidden=512, intermediate=640, heads=8, vocab=8192)
    checkpoint = make_checkpoint(tmp_path / "checkpoint", shape)
    with converting(checkpoint, tmp_path / "store", bits=bits) as child:
        _, _, peak = line(child)
    assert int(peak) < 2 * shape.layer_bytes() + shape.trunk_bytes()

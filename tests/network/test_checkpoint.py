"""expert_network.model.checkpoint"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from expert_network.backend import detect
from expert_network.errors import CheckpointError, ConfigRefused
from expert_network.model.checkpoint import open_checkpoint
from expert_network.model.seam import find_switches

GOLDEN = Path(__file__).parents[1] / "golden"

detect()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A sound checkpoint that a test may damage."""
    return Path(shutil.copytree(GOLDEN / "olmoe", tmp_path / "olmoe"))


def edit(file: Path, **entries: Any) -> None:
    """Set entries of a JSON file; None takes one out."""
    config = json.loads(file.read_text()) | entries
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def split(checkpoint: Path, names: list[str], index: bool) -> None:
    """Spread the tensors over shards with these names."""
    tensors = dict(mx.load(str(checkpoint / "model.safetensors")))  # type: ignore[arg-type]
    where = {name: names[n % len(names)] for n, name in enumerate(sorted(tensors))}
    for shard in names:
        mx.save_safetensors(
            str(checkpoint / shard), {k: v for k, v in tensors.items() if where[k] == shard}
        )
    (checkpoint / "model.safetensors").unlink()
    if index:
        text = json.dumps({"weight_map": where})
        (checkpoint / "model.safetensors.index.json").write_text(text)


SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


# --- sound checkpoints


def test_a_checkpoint_opens_without_reading_its_tensors(checkpoint: Path) -> None:
    """The model is lazy: opening takes no memory for its weights."""
    before = mx.get_active_memory()
    opened = open_checkpoint(checkpoint)
    assert [site.layer for site in find_switches(opened.model)] == [0, 1]
    assert mx.get_active_memory() - before < opened.weight_bytes / 10
    assert opened.config["model_type"] == "olmoe"
    assert opened.path == checkpoint


def test_the_weights_are_counted_in_bytes(checkpoint: Path) -> None:
    """weight_bytes is the size of all tensors, headers left out."""
    tensors: Any = mx.load(str(checkpoint / "model.safetensors"))
    assert open_checkpoint(checkpoint).weight_bytes == sum(a.nbytes for a in tensors.values())


@pytest.mark.parametrize("index", [True, False], ids=["index", "no index"])
@pytest.mark.parametrize(
    "names",
    [SHARDS, ["weights.00.safetensors", "weights.01.safetensors"], ["part-a.safetensors"]],
    ids=["usual", "old mlx-lm", "one of another name"],
)
def test_shards_may_be_called_anything(checkpoint: Path, names: list[str], index: bool) -> None:
    """mlx-lm reads model*.safetensors only; other names open all the same."""
    reference = _logits(checkpoint)
    split(checkpoint, names, index)
    assert mx.array_equal(_logits(checkpoint), reference)


def test_the_index_decides_which_files_are_read(checkpoint: Path) -> None:
    """A file that the index does not name is no part of the model, whatever it holds."""
    reference = _logits(checkpoint)
    split(checkpoint, SHARDS, index=True)
    mx.save_safetensors(str(checkpoint / "model-extra.safetensors"), {"other": mx.ones((3,))})
    assert mx.array_equal(_logits(checkpoint), reference)


def _logits(checkpoint: Path) -> mx.array:
    model: Any = open_checkpoint(checkpoint).model
    logits: mx.array = model(mx.array([[1, 2, 3]]))
    mx.eval(logits)
    return logits


# --- damaged ones


def _no_config(path: Path) -> None:
    (path / "config.json").unlink()


def _broken_config(path: Path) -> None:
    (path / "config.json").write_text('{"model_type": "olmo')


def _deep_config(depth: int) -> Callable[[Path], None]:
    text = '{"model_type": "olmoe", "x": ' + "[" * depth + "]" * depth + "}"

    def dig(path: Path) -> None:
        (path / "config.json").write_text(text)

    return dig


def _overlap(path: Path) -> None:
    file = path / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = next(name for name in header if "experts.3.down_proj" in name)
    twin = next(name for name in header if "experts.2.down_proj" in name)
    header[name]["data_offsets"] = header[twin]["data_offsets"]
    changed = json.dumps(header).encode()
    file.write_bytes(len(changed).to_bytes(8, "little") + changed + data[8 + length :])


def _config_is_a_list(path: Path) -> None:
    (path / "config.json").write_text("[1, 2]")


def _no_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()


def _pickles(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def _gguf(path: Path) -> None:
    (path / "model.safetensors").rename(path / "model.gguf")


def _shard_missing(path: Path) -> None:
    split(path, SHARDS, index=True)
    (path / SHARDS[1]).unlink()


def _shard_missing_without_index(path: Path) -> None:
    split(path, SHARDS, index=False)
    (path / SHARDS[1]).unlink()


def _index_without_map(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text("{}")


def _index_leads_outside(path: Path) -> None:
    text = json.dumps({"weight_map": {"x": "../elsewhere.safetensors"}})
    (path / "model.safetensors.index.json").write_text(text)


def _cut(keep: int) -> Callable[[Path], None]:
    def cut(path: Path) -> None:
        file = path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:keep])

    return cut


def _too_long(path: Path) -> None:
    with (path / "model.safetensors").open("ab") as file:
        file.write(b"more")


def _absurd_header(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"\xff" * 8 + b"{}" * 100)


def _damaged_header(path: Path) -> None:
    (path / "model.safetensors").write_bytes((8).to_bytes(8, "little") + b'{"a": 1}')


def _endless_tensor(path: Path) -> None:
    text = b'{"a":{"data_offsets":[0,Infinity]}}'
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)


def _lfs_pointer(path: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"
    (path / "model.safetensors").write_text(text)


def _tensor_missing(path: Path) -> None:
    tensors: Any = mx.load(str(path / "model.safetensors"))
    tensors.pop("model.norm.weight")
    mx.eval(tensors)
    mx.save_safetensors(str(path / "model.safetensors"), tensors)


def _config(**entries: Any) -> Callable[[Path], None]:
    return lambda path: edit(path / "config.json", **entries)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (_no_config, "there is no config.json"),
    "config cut short": (_broken_config, "cannot be read as JSON"),
    "config as deep as a well": (_deep_config(900), "not a JSON object of a sane depth"),
    "config deeper than that": (_deep_config(200_000), "cannot be read as JSON"),
    "config is a list": (_config_is_a_list, "not a JSON object"),
    "no model type": (_config(model_type=None), "names no model_type"),
    "model type is a number": (_config(model_type=3), "names no model_type"),
    "unknown model type": (_config(model_type="nonsense"), "knows no model_type 'nonsense'"),
    "a module that is no model": (_config(model_type="base"), "knows no model_type 'base'"),
    "a path for a model type": (_config(model_type="../x"), "knows no model_type '../x'"),
    "no weights": (_no_weights, "no safetensors files"),
    "pickles": (_pickles, "pickles, which can run code"),
    "GGUF": (_gguf, "GGUF"),
    "shard missing": (_shard_missing, f"1 of 2 shards missing: {SHARDS[1]}"),
    "shard missing, no index": (_shard_missing_without_index, "1 of 2 shards missing"),
    "index without a map": (_index_without_map, "no weight_map"),
    "index leads outside": (_index_leads_outside, "outside the folder"),
    "cut in its data": (_cut(500_000), "truncated: 500000 bytes, its header says 1062416"),
    "cut in its header": (_cut(100), "truncated within its header"),
    "cut in its length": (_cut(4), "no safetensors file"),
    "empty": (_cut(0), "no safetensors file"),
    "too long": (_too_long, "too long"),
    "absurd header": (_absurd_header, "no safetensors file"),
    "damaged header": (_damaged_header, "header is damaged"),
    "a tensor without an end": (_endless_tensor, "header is damaged"),
    "tensors on top of each other": (_overlap, "header is damaged"),
    "more experts per token than there are": (
        _config(num_experts_per_tok=9),
        "num_experts_per_tok is 9 and a layer has 8 experts",
    ),
    "experts per token as text": (_config(num_experts_per_tok="4"), "num_experts_per_tok is '4'"),
    "LFS pointer": (_lfs_pointer, "a Git LFS pointer"),
    "tensor missing": (_tensor_missing, "model.norm.weight"),
    "sizes that do not fit": (_config(hidden_size=32), "mlx-lm cannot build it"),
    "setting missing": (_config(num_hidden_layers=None), "num_hidden_layers"),
    "not MoE": (_config(model_type="llama"), "mlx-lm cannot build it"),
}


@pytest.mark.parametrize(("damage", "words"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_refused_in_a_sentence(
    checkpoint: Path, damage: Callable[[Path], None], words: str
) -> None:
    """What, where and what to do, on one line, with exit code 3."""
    damage(checkpoint)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(checkpoint)
    said = str(caught.value)
    assert words in said
    assert str(checkpoint) in said
    assert "\n" not in said and said.endswith(".") and len(said) < 600
    assert caught.value.exit_code == 3


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    """A missing folder and a file are told apart."""
    with pytest.raises(CheckpointError, match="no such folder"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="not a folder"):
        open_checkpoint(tmp_path / "file")


def test_a_store_is_not_a_checkpoint(tmp_path: Path) -> None:
    """Converting a store again says that it is one."""
    for name in ("config.json", "manifest.json", "trunk.safetensors"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match="store already"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("entry", ["auto_map", "model_file"])
@pytest.mark.parametrize("where", ["config.json", "inner", "tokenizer_config.json"])
def test_a_config_that_brings_code_is_refused_by_name(
    checkpoint: Path, entry: str, where: str
) -> None:
    """At any depth, in both configs, before anything else of the model is looked at."""
    (checkpoint / "model.safetensors").unlink()
    if where == "inner":
        edit(checkpoint / "config.json", text_config={"inner": [{entry: "code.py"}]})
    else:
        (checkpoint / where).touch()
        text = (checkpoint / where).read_text() or "{}"
        (checkpoint / where).write_text(text)
        edit(checkpoint / where, **{entry: {"AutoModel": "code.Model"}})
    with pytest.raises(ConfigRefused) as caught:
        open_checkpoint(checkpoint)
    assert repr(entry) in str(caught.value)
    assert caught.value.path.name == ("config.json" if where == "inner" else where)


def test_a_dense_model_is_named_as_one(tmp_path: Path) -> None:
    """A sound checkpoint without experts is refused for that, not for its shapes."""
    config = {
        "model_type": "llama",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 8,
    }
    _save(tmp_path, config)
    with pytest.raises(CheckpointError, match="llama is not a mixture-of-experts model"):
        open_checkpoint(tmp_path)


def test_dbrx_is_named_as_the_exception(tmp_path: Path) -> None:
    """The one family without a switch module is refused by name."""
    config = {
        "model_type": "dbrx",
        "vocab_size": 8,
        "d_model": 16,
        "n_layers": 1,
        "n_heads": 2,
        "ffn_config": {"ffn_hidden_size": 8, "moe_num_experts": 2, "moe_top_k": 1},
        "attn_config": {"kv_n_heads": 1, "clip_qkv": 8, "rope_theta": 10000.0},
    }
    _save(tmp_path, config)
    with pytest.raises(CheckpointError, match="dbrx is a mixture of experts"):
        open_checkpoint(tmp_path)


def _save(folder: Path, config: dict[str, Any]) -> None:
    """A random checkpoint of `config`, as mlx-lm would save it."""
    from mlx_lm.utils import _get_classes, save_model

    model_class, args_class = _get_classes(config)
    save_model(folder, model_class(args_class.from_dict(config)))
    (folder / "config.json").write_text(json.dumps(config))

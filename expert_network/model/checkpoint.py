"""Open a Hugging Face checkpoint as a lazy mlx-lm model, or say in a sentence why not."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from mlx.nn.layers.base import Module
from mlx_lm import utils as mlx_lm_utils

from expert_network.errors import CheckpointError, ConfigRefused
from expert_network.model.config import Config, code_entry, normalise_config, too_deep
from expert_network.model.family_weights import prepared
from expert_network.model.rope import scaled
from expert_network.model.seam import SwitchSite, expert_tensors, find_switches

__all__ = [
    "Checkpoint",
    "check_config",
    "check_experts",
    "model_classes",
    "normalise_config",
    "open_checkpoint",
]

# safetensors' own limit; a longer header is not one.
MAX_HEADER = 100_000_000
_NUMBERED = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")
_AGAIN = "download it again"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was checked. `model`'s arrays are lazy: nothing of them is in memory.

    `config` is normalised and completed by mlx-lm's loader; `weight_bytes` counts all tensors.
    """

    model: Module
    config: Config
    path: Path
    weight_bytes: int


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Check the checkpoint at `path` from the outside in, then load it lazily.

    Raises ConfigRefused for a config that brings code, CheckpointError for everything else.
    """
    path = Path(path)
    check_config(path)
    shards = _find_shards(path)
    weight_bytes = sum(_check_shard(shard) for shard in shards)
    with _as_mlx_lm_expects(path, shards) as folder:
        model, config = _load(path, folder)
    sites = find_switches(model)
    if not sites:
        raise CheckpointError(path, *_without_switches(config))
    _check_routing(path / "config.json", config, sites)
    return Checkpoint(model, config, path, weight_bytes)


def _check_routing(file: Path, config: Config, sites: list[SwitchSite]) -> None:
    """mlx-lm takes any number of experts per token, and fails when the first token is routed."""
    chosen = (config.get("text_config") or config).get("num_experts_per_tok")
    if chosen is None or isinstance(chosen, list):  # named otherwise, or a number for each layer
        return
    experts = min(len(array) for site in sites for array in expert_tensors(site.module).values())
    if type(chosen) is not int or not 1 <= chosen <= experts:
        problem = f"num_experts_per_tok is {chosen!r} and a layer has {experts} experts"
        raise CheckpointError(file, problem, _AGAIN)


def check_config(path: Path) -> Config:
    """The config of the checkpoint at `path`, as it stands there, after the checks that need no
    weights: a download makes them before the long part. Raises as open_checkpoint does.
    """
    config = _read_config(path)
    _check_model_type(path, config)
    return config


def check_experts(path: Path, config: Config) -> None:
    """Raise CheckpointError if this config's model has no experts, as far as that can be told.

    The model is built without its weights: a download asks before it fetches them.
    """
    config = json.loads(json.dumps(config))
    try:
        classes: tuple[Any, Any] = model_classes(config)
        model = classes[0](classes[1].from_dict(config))
    except Exception:  # the loader's own repairs of a config may still make it work
        return
    if not find_switches(model):
        raise CheckpointError(path, *_without_switches(config))


def model_classes(config: Config) -> tuple[type[Module], type[Any]]:
    """mlx-lm's Model and ModelArgs for `config`, which is normalised in place.

    mlx-lm's loader calls this with the very dict that it builds the model from.
    """
    normal = normalise_config(config)
    config.clear()
    config.update(normal)
    model_class, args_class = mlx_lm_utils._get_classes(config)
    return prepared(scaled(model_class, config), str(config["model_type"])), args_class


# --- the config


def _read_config(path: Path) -> Config:
    if not path.is_dir():
        problem = "not a folder" if path.exists() else "no such folder"
        raise CheckpointError(path, problem, "give the folder that holds config.json")
    if (path / "trunk.safetensors").exists() and (path / "manifest.json").exists():
        raise CheckpointError(path, "this is a store already", "use it as it is")
    config = _read_json(path / "config.json", path)
    for name in ("config.json", "tokenizer_config.json"):
        if (path / name).exists() and (entry := code_entry(_read_json(path / name, path))):
            raise ConfigRefused(path / name, entry)
    return config


def _read_json(file: Path, checkpoint: Path) -> Config:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        advice = "give the folder of a Hugging Face checkpoint"
        raise CheckpointError(checkpoint, f"there is no {file.name}", advice) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(file, f"cannot be read as JSON ({error})", _AGAIN) from error
    if not isinstance(value, dict) or too_deep(value):
        raise CheckpointError(file, "is not a JSON object of a sane depth", _AGAIN)
    return value


def _check_model_type(path: Path, config: Config) -> None:
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(path / "config.json", "it names no model_type", _AGAIN)
    try:
        mlx_lm_utils._get_classes(normalise_config(config))
    except (ValueError, AttributeError, TypeError, ImportError):
        problem = f"mlx-lm knows no model_type {model_type!r}"
        advice = "choose a model that it supports, or try a newer mlx-lm"
        raise CheckpointError(path, problem, advice) from None


# --- the files


def _find_shards(path: Path) -> list[Path]:
    """The files that hold the weights: the index's, else all that look like a model's."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        names = _read_json(index, path).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(n, str) for n in names.values()):
            raise CheckpointError(index, "it has no weight_map", _AGAIN)
        shards = sorted(set(names.values()))
        if any(Path(name).name != name for name in shards):
            raise CheckpointError(index, "it names files outside the folder", _AGAIN)
    else:
        present = sorted(file.name for file in path.glob("*.safetensors"))
        shards = [name for name in present if name.startswith("model")] or present
        shards = sorted({sibling for name in shards for sibling in _siblings(name)})
    if not shards:
        raise CheckpointError(path, *_without_safetensors(path))
    missing = [name for name in shards if not (path / name).exists()]
    if missing:
        problem = f"{len(missing)} of {len(shards)} shards missing: {_some(missing)}"
        raise CheckpointError(path, problem, "download what is missing")
    return [path / name for name in shards]


def _siblings(name: str) -> list[str]:
    """All the names that model-00002-of-00003.safetensors implies."""
    match = _NUMBERED.fullmatch(name)
    if match is None or int(match[3]) > 100_000:
        return [name]
    width = len(match[2])
    count = int(match[3])
    return [f"{match[1]}-{n:0{width}}-of-{match[3]}.safetensors" for n in range(1, count + 1)]


def _without_safetensors(path: Path) -> tuple[str, str]:
    suffixes = {file.suffix for file in path.iterdir()}
    if suffixes & {".bin", ".pt", ".pth"}:
        return "its weights are pickles, which can run code", "find it saved as safetensors"
    if ".gguf" in suffixes:
        return "its weights are GGUF", "find it saved as safetensors"
    return "there are no safetensors files", _AGAIN


def _check_shard(shard: Path) -> int:
    """Compare a shard's header with the file's size; the bytes of its tensors."""
    size = shard.stat().st_size
    with shard.open("rb") as file:
        start = file.read(8)
        if start == b"version ":
            raise CheckpointError(
                shard, "a Git LFS pointer, not the weights", "run `git lfs pull` in that folder"
            )
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > MAX_HEADER:
            raise CheckpointError(shard, "this is no safetensors file", _AGAIN)
        header = file.read(length)
    if len(header) < length:
        raise CheckpointError(shard, "truncated within its header", _AGAIN)
    data = _data_bytes(shard, header)
    if size != 8 + length + data:
        problem = f"{'truncated' if size < 8 + length + data else 'too long'}: {size} bytes, "
        raise CheckpointError(shard, f"{problem}its header says {8 + length + data}", _AGAIN)
    return data


def _data_bytes(shard: Path, header: bytes) -> int:
    try:
        tensors = json.loads(header)
        spans = sorted(t["data_offsets"] for k, t in tensors.items() if k != "__metadata__")
        end = 0
        for begin, after in spans:
            # Each begins where the one before it ended: the format allows no gaps, no overlaps.
            if begin != end or type(after) is not int or after < begin:
                raise ValueError("its tensors overlap or leave gaps")
            end = after
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(shard, "its safetensors header is damaged", _AGAIN) from error
    return end


@contextmanager
def _as_mlx_lm_expects(path: Path, shards: list[Path]) -> Iterator[Path]:
    """A folder in which mlx-lm's pattern model*.safetensors finds exactly `shards`."""
    if sorted(path.glob("model*.safetensors")) == sorted(shards):
        yield path
        return
    with TemporaryDirectory(prefix="expert-network-") as name:
        folder = Path(name)
        for file in path.glob("*.json"):
            os.symlink(file.resolve(), folder / file.name)
        for number, shard in enumerate(shards):
            os.symlink(shard.resolve(), folder / f"model-{number:05}.safetensors")
        yield folder


# --- mlx-lm


def _load(path: Path, folder: Path) -> tuple[Module, Config]:
    try:
        model, config = mlx_lm_utils.load_model(folder, lazy=True, get_model_classes=model_classes)
    except Exception as error:  # mlx-lm raises whatever its code meets
        reason = " ".join(str(error).split()) or "no reason given"
        problem = f"mlx-lm cannot build it ({type(error).__name__}: {_short(reason)})"
        advice = "its config and weights do not fit together, or this variant is not supported"
        raise CheckpointError(path, problem, advice) from error
    return cast(Module, model), cast(Config, config)


def _without_switches(config: Config) -> tuple[str, str]:
    if config["model_type"] == "dbrx":
        return "dbrx is a mixture of experts that mlx-lm builds without a switch module", (
            "it is the one such family that is not supported; choose another"
        )
    problem = f"this {config['model_type']} is not a mixture-of-experts model"
    return problem, "run it with mlx-lm itself: there are no experts to spread"


def _short(text: str, limit: int = 300) -> str:
    return text if len(text) <= limit else text[:limit] + "…"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")

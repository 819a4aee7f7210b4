"""From a Hugging Face checkpoint to a store, one expert projection in memory at a time."""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten
from mlx_lm.utils import _encode_tagged_floats, quantize_model

from expert_network.errors import CheckpointError
from expert_network.model.checkpoint import Checkpoint, open_checkpoint
from expert_network.model.config import Config
from expert_network.model.seam import SwitchSite, expert_tensors, find_switches
from expert_network.progress import Progress, silent
from expert_network.store.manifest import (
    ACTIVATION_DTYPES,
    ALIGNMENT,
    CONFIG,
    TRUNK,
    VERSION,
    LayerSpec,
    Manifest,
    align,
    canonical,
    is_file_name,
    lay_out,
)
from expert_network.store.reader import Store, is_vocabulary
from expert_network.store.trunk_file import TensorSource, serialize
from expert_network.store.writer import LayerFile, StoreWriter, check_out

Warn = Callable[[str], None]
# mlx-lm's: whether, or how, to quantize the module of this path.
Predicate = Callable[[str, Any], bool | dict[str, Any]]

# What the tokenizer and the chat template are made of; everything else of a checkpoint stays out.
_TOKENIZER_FILES = re.compile(
    r"tokenizer[\w.-]*\.json|special_tokens_map\.json|added_tokens\.json|generation_config\.json"
    r"|chat_template\.json|vocab\.\w+|merges\.txt|.+\.model|.+\.tiktoken|.+\.jinja"
)
_RESERVE = 8 << 20  # bytes, for the manifest and what the file system keeps for itself


@dataclass
class _Plan:
    """What will be written, known before anything is evaluated.

    `arrays` holds the model's lazy arrays by name, and is the only thing that does: popping one
    gives its memory back. `layers` lack their sha256.
    """

    config: Config
    dtype: str
    layers: list[LayerSpec]
    arrays: dict[str, mx.array]
    trunk: list[str]
    copies: list[Path]
    fingerprint: str

    @property
    def trunk_bytes(self) -> int:
        return sum(self.arrays[name].nbytes for name in self.trunk)

    @property
    def block_bytes(self) -> int:
        return sum(spec.experts * spec.block_bytes for spec in self.layers)

    @property
    def disk_bytes(self) -> int:
        copies = sum(path.stat().st_size for path in self.copies)
        files = sum(spec.file_bytes for spec in self.layers)
        return files + self.trunk_bytes + copies + _RESERVE


def preprocess(
    src: Path | str,
    out: Path | str,
    bits: int | None = None,
    group_size: int = 64,
    progress: Progress = silent,
    warn: Warn = lambda sentence: None,
) -> Store:
    """Convert the checkpoint `src` into a store at `out` and open it.

    The weights stay as they are, or are quantized (affine, `bits` a weight and a scale and bias for
    each `group_size`). At most one projection of one layer is in memory, about three times over.
    A run that was killed is gone on with. `warn` is given a sentence for what is worth knowing.
    Raises CheckpointError, ConfigRefused, StoreError (out is taken), DiskFull.
    """
    out = Path(out)
    check_out(out)
    with _memory_returned():
        plan = _plan(open_checkpoint(src), bits, group_size, warn)
        with StoreWriter(out, plan.fingerprint) as writer:
            writer.reserve(plan.disk_bytes)
            _write(plan, writer, progress)
    return Store.open(out)


@contextlib.contextmanager
def _memory_returned() -> Iterator[None]:
    """MLX gives freed memory back at once instead of keeping it for later arrays."""
    before = mx.set_cache_limit(0)
    try:
        yield
    finally:
        mx.set_cache_limit(before)


# --- planning


def _plan(checkpoint: Checkpoint, bits: int | None, group_size: int, warn: Warn) -> _Plan:
    path, model, config = checkpoint.path, checkpoint.model, checkpoint.config
    if bits is not None:
        model, config = _quantize(checkpoint, bits, group_size, warn)
    layers = [_layer_spec(path, site) for site in find_switches(model)]
    arrays = _parameters(model)
    routed = {f"{spec.path}.{tensor.name}" for spec in layers for tensor in spec.tensors}
    trunk = sorted(arrays.keys() - routed)
    copies = _tokenizer_files(path)
    if not any(is_vocabulary(file.name) for file in copies):
        warn(f"{path} has no tokenizer: the store works with token ids, not with text.")
    return _Plan(
        config=_final_config(config, keep_vision="vision_tower" in model.get("model", {})),
        dtype=_activation_dtype(arrays[name] for name in trunk),
        layers=layers,
        arrays=arrays,
        trunk=trunk,
        copies=copies,
        fingerprint=_fingerprint(path, config, bits, group_size),
    )


def _layer_spec(path: Path, site: SwitchSite) -> LayerSpec:
    tensors = expert_tensors(site.module)
    first = site.module["gate_proj" if "gate_proj" in site.module else "fc1"]
    experts = first.num_experts
    for name, array in tensors.items():
        if array.ndim == 0 or array.shape[0] != experts:
            problem = f"{site.path}.{name} {array.shape} does not belong to {experts} experts"
            raise CheckpointError(path, problem, "choose a model of another family")
    layout = [(name, _dtype(array), tuple(array.shape[1:])) for name, array in tensors.items()]
    specs, block_bytes = lay_out(layout)
    stride = align(block_bytes, ALIGNMENT)
    return LayerSpec(
        site.layer, site.path, experts, first.input_dims, specs, block_bytes, stride, ()
    )


def _activation_dtype(trunk: Iterator[mx.array]) -> str:
    """The dtype in which most of the trunk's numbers are, scales of quantized ones included."""
    count = Counter(dict.fromkeys(ACTIVATION_DTYPES, 0))
    for array in trunk:
        if _dtype(array) in ACTIVATION_DTYPES:
            count[_dtype(array)] += array.size
    return count.most_common(1)[0][0]


def _final_config(config: Config, keep_vision: bool) -> Config:
    """The config as mlx-lm saves it beside a model: no path of this machine, no absent tower."""
    dropped = {"_name_or_path"} if keep_vision else {"_name_or_path", "vision_config"}
    encoded: Config = _encode_tagged_floats(config)
    return {key: value for key, value in encoded.items() if key not in dropped}


def _tokenizer_files(path: Path) -> list[Path]:
    return sorted(
        file
        for file in path.iterdir()
        if file.is_file() and _TOKENIZER_FILES.fullmatch(file.name) and is_file_name(file.name)
    )


def _fingerprint(path: Path, config: Config, bits: int | None, group_size: int) -> str:
    """Names a conversion, for resuming on this machine; nothing of it enters the manifest."""
    files = sorted(file for file in path.iterdir() if file.suffix in (".safetensors", ".json"))
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    made_by = [VERSION, version("mlx"), version("mlx-lm"), str(mx.default_device())]
    text = canonical([_encode_tagged_floats(config), bits, group_size, stats, made_by])
    return hashlib.sha256(text).hexdigest()


# --- quantizing, lazily


def _quantize(checkpoint: Checkpoint, bits: int, group_size: int, warn: Warn) -> tuple[Any, Config]:
    """mlx-lm's own quantization, lazily; what it cannot quantize stays, and is told."""
    _check_quantizable(checkpoint, group_size)
    wanted: Predicate = getattr(checkpoint.model, "quant_predicate", None) or (lambda *_: True)
    skipped: list[str] = []

    def predicate(name: str, module: Any) -> bool | dict[str, Any]:
        # Some families ask for routers in groups of 64 whatever the others are in.
        choice = wanted(name, module)
        group = choice.get("group_size", group_size) if isinstance(choice, dict) else group_size
        if module.weight.shape[-1] % group == 0:
            return choice
        skipped.append(f"{name} ({group})")
        return False

    skipped += [f"{name} ({group_size})" for name in _indivisible(checkpoint.model, group_size)]
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # mlx-lm prints its bits per weight
            model, config = quantize_model(
                checkpoint.model, checkpoint.config, group_size, bits, quant_predicate=predicate
            )
    except ValueError as error:
        problem = f"mlx-lm cannot quantize it ({error})"
        raise CheckpointError(checkpoint.path, problem, "leave out --bits") from error
    if skipped:
        some = ", ".join(sorted(skipped)[:3]) + (", …" if len(skipped) > 3 else "")
        warn(
            f"{len(skipped)} matrices stay unquantized, their rows do not divide into groups of "
            f"the size in brackets: {some}."
        )
    return model, config


def _check_quantizable(checkpoint: Checkpoint, group_size: int) -> None:
    """Raise CheckpointError for experts that are quantized, or that the groups do not divide."""
    linears = [
        (f"{site.path}.{name}", linear)
        for site in find_switches(checkpoint.model)
        for name, linear in _modules(site.module)
    ]
    for _, linear in linears:
        if hasattr(linear, "bits"):
            problem = f"its experts are quantized already ({linear.mode}, {linear.bits} bits)"
            raise CheckpointError(checkpoint.path, problem, "leave out --bits")
    for name, linear in linears:
        if not hasattr(linear, "to_quantized") or not linear.weight.shape[-1] % group_size:
            continue
        row = linear.weight.shape[-1]
        problem = f"{name} has rows of {row}, which do not divide into groups of {group_size}"
        smaller = [size for size in (64, 32) if not row % size]
        advice = f"try --group-size {smaller[0]}" if smaller else "leave out --bits"
        raise CheckpointError(checkpoint.path, problem, advice)


def _indivisible(model: Any, group_size: int) -> list[str]:
    """The matrices that mlx-lm leaves unquantized because the groups do not divide their rows."""
    return sorted(
        name
        for name, module in _modules(model)
        if hasattr(module, "to_quantized") and module.weight.shape[-1] % group_size
    )


# --- writing


def _write(plan: _Plan, writer: StoreWriter, progress: Progress) -> None:
    total = plan.block_bytes + plan.trunk_bytes
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total, "converting")

    layers = [_write_layer(plan, spec, writer, advance) for spec in plan.layers]
    files = {path.name: writer.add_copy(path) for path in plan.copies}
    files[CONFIG] = writer.add(CONFIG, [canonical(plan.config)])
    files[TRUNK] = writer.add(TRUNK, _advancing(serialize(_trunk(plan)), advance))
    writer.finish(Manifest(plan.config["model_type"], plan.dtype, tuple(layers), files))


def _write_layer(
    plan: _Plan, spec: LayerSpec, writer: StoreWriter, advance: Callable[[int], None]
) -> LayerSpec:
    known = writer.finished(spec)
    if known is not None:
        for tensor in spec.tensors:
            del plan.arrays[f"{spec.path}.{tensor.name}"]
        advance(spec.experts * spec.block_bytes)
        return known
    with writer.layer(spec) as file:
        for _, tensors in groupby(spec.tensors, key=lambda tensor: tensor.name.rpartition(".")[0]):
            names = [tensor.name for tensor in tensors]
            _write_projection(plan, file, names, advance)
        return writer.finish_layer(file)


def _write_projection(
    plan: _Plan, file: LayerFile, names: Sequence[str], advance: Callable[[int], None]
) -> None:
    """Weight, scales and biases come from one computation: they are evaluated together."""
    arrays = {name: plan.arrays.pop(f"{file.spec.path}.{name}") for name in names}
    mx.eval(list(arrays.values()))
    for tensor in file.spec.tensors:
        if tensor.name not in arrays:
            continue
        stack = _raw(arrays.pop(tensor.name))
        for expert in range(file.spec.experts):
            file.put(expert, tensor, np.ascontiguousarray(stack[expert]).data)
        advance(tensor.nbytes * file.spec.experts)


def _trunk(plan: _Plan) -> Iterator[TensorSource]:
    for name in plan.trunk:
        array = plan.arrays[name]

        def read(name: str = name) -> memoryview:
            return np.ascontiguousarray(_raw(plan.arrays.pop(name))).data.cast("B")

        yield TensorSource(name, _dtype(array), tuple(array.shape), read)


def _advancing(
    pieces: Iterator[bytes | memoryview], advance: Callable[[int], None]
) -> Iterator[bytes | memoryview]:
    yield next(pieces)  # the header, no part of the tensors' bytes
    for piece in pieces:
        yield piece
        advance(len(piece))


def _raw(array: mx.array) -> npt.NDArray[Any]:
    """The array's own bits for numpy, which has no bfloat16."""
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def _parameters(module: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(module.parameters()))


def _modules(module: Any) -> list[tuple[str, Any]]:
    return list(module.named_modules())


def _dtype(array: mx.array) -> str:
    return str(array.dtype).removeprefix("mlx.core.")

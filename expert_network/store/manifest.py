"""The manifest: what lies where in a store, and the sha256 of all of it. docs/store-format.md.

Everything here is checked where bytes come in (`Manifest.from_bytes`): a manifest that exists is a
sound one, whether it was read from a disk or sent by a peer.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from expert_network.errors import StoreError

FORMAT = "expert-network-store"
VERSION = 1
MANIFEST = "manifest.json"
CONFIG = "config.json"
TRUNK = "trunk.safetensors"
BLOCKS = "bin"

ALIGNMENT = 16384  # of a block in its file: the page of Apple silicon, a multiple of every other's
TENSOR_ALIGNMENT = 64  # of a tensor in its block: a cache line, the widest vector load

# Bytes per element, by the name MLX gives the type.
DTYPES = MappingProxyType(
    {
        "uint8": 1,
        "int8": 1,
        "uint16": 2,
        "int16": 2,
        "float16": 2,
        "bfloat16": 2,
        "uint32": 4,
        "int32": 4,
        "float32": 4,
    }
)
ACTIVATION_DTYPES = ("bfloat16", "float16", "float32")

MAX_MANIFEST = 64 << 20  # bytes; 61 layers of 384 experts take 1.7 MB
MAX_LAYERS = 4096
MAX_LAYER = 0xFFFF  # layer and expert are u16 on the wire
MAX_EXPERTS = 0x10000
MAX_HIDDEN = 1 << 17
MAX_TENSORS = 64  # of one block; three projections of five tensors is the most met
MAX_RANK = 4
MAX_BLOCK = 4 << 30
MAX_FILES = 256
MAX_FILE = 1 << 42

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_MODULE_PATH = re.compile(r"[A-Za-z0-9_]{1,64}(\.[A-Za-z0-9_]{1,64}){0,15}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def align(count: int, alignment: int) -> int:
    """`count` rounded up to a multiple of `alignment`."""
    return -(-count // alignment) * alignment


def canonical(value: Any) -> bytes:
    """The one JSON text of a value: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a block: `shape` lacks the expert axis, `offset` counts from its start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class LayerSpec:
    """One MoE layer: `experts` blocks of `block_bytes`, each `stride` bytes after the one before.

    `path` is the switch module's path in the model, `hidden` the length of a row that enters it,
    `sha256` the hex digest of each block in expert order.
    """

    layer: int
    path: str
    experts: int
    hidden: int
    tensors: tuple[TensorSpec, ...]
    block_bytes: int
    stride: int
    sha256: tuple[str, ...]

    @property
    def file(self) -> str:
        """The layer's file, relative to the store."""
        return f"{BLOCKS}/layer_{self.layer:02d}.bin"

    @property
    def marks(self) -> str:
        """The file that says which blocks are there, where it is a part of them."""
        return f"{BLOCKS}/layer_{self.layer:02d}.have"

    @property
    def file_bytes(self) -> int:
        """Size of the layer's file, the padding after the last block included."""
        return self.experts * self.stride

    def offset(self, expert: int) -> int:
        """Where the expert's block starts in the layer's file."""
        return expert * self.stride


@dataclass(frozen=True)
class FileSpec:
    """Any other file of the store."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A store's table of contents. `dtype` is the checkpoint's own activation dtype."""

    model_type: str
    dtype: str
    layers: tuple[LayerSpec, ...]
    files: Mapping[str, FileSpec]

    @property
    def shape(self) -> list[tuple[int, int]]:
        """(layer, number of experts) of every MoE layer, in order."""
        return [(spec.layer, spec.experts) for spec in self.layers]

    @cached_property
    def _by_layer(self) -> dict[int, LayerSpec]:
        return {spec.layer: spec for spec in self.layers}

    def layer(self, layer: int) -> LayerSpec:
        """The spec of one MoE layer. Raises KeyError for a layer that has no experts."""
        return self._by_layer[layer]

    @property
    def block_count(self) -> int:
        """How many blocks the model has."""
        return sum(spec.experts for spec in self.layers)

    @property
    def block_bytes(self) -> int:
        """Bytes of all blocks, padding left out."""
        return sum(spec.experts * spec.block_bytes for spec in self.layers)

    @property
    def total_bytes(self) -> int:
        """Bytes of every file but the manifest."""
        blocks = sum(spec.file_bytes for spec in self.layers)
        return blocks + sum(spec.size for spec in self.files.values())

    def to_bytes(self) -> bytes:
        """The canonical bytes: equal manifests give equal bytes on every machine."""
        return canonical(
            {
                "format": FORMAT,
                "version": VERSION,
                "model_type": self.model_type,
                "dtype": self.dtype,
                "layers": [_layer_to_json(spec) for spec in self.layers],
                "files": {
                    name: {"size": spec.size, "sha256": spec.sha256}
                    for name, spec in self.files.items()
                },
            }
        )

    @cached_property
    def digest(self) -> str:
        """The model digest: hex sha256 of the canonical bytes."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @classmethod
    def from_bytes(cls, data: bytes, where: Path | str) -> Manifest:
        """Read and check a manifest; `where` (a path or a node) is named in what goes wrong.

        Raises StoreError if the bytes are not a canonical manifest of this version whose every
        field is in bounds, whose files lie in the store and whose tensors lie in their block.
        """
        manifest = _Reader(where).manifest(data)
        if manifest.to_bytes() != bytes(data):
            raise StoreError(where, "the manifest is not in its canonical form", _REWRITE)
        return manifest


_REWRITE = "convert the checkpoint again or fetch the store from a peer"


def _layer_to_json(spec: LayerSpec) -> dict[str, Any]:
    return {
        "layer": spec.layer,
        "path": spec.path,
        "experts": spec.experts,
        "hidden": spec.hidden,
        "tensors": [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "offset": tensor.offset,
                "nbytes": tensor.nbytes,
            }
            for tensor in spec.tensors
        ],
        "block_bytes": spec.block_bytes,
        "stride": spec.stride,
        "sha256": list(spec.sha256),
    }


class _Reader:
    """Turns JSON into a Manifest, one checked field at a time."""

    def __init__(self, where: Path | str) -> None:
        self._where = where

    def manifest(self, data: bytes) -> Manifest:
        root = self._fields(self._json(data), "the manifest")
        self._version(root)
        model_type = self._text(root, "model_type", "the manifest")
        dtype = self._text(root, "dtype", "the manifest")
        if dtype not in ACTIVATION_DTYPES:
            self._refuse(f"the activation dtype {dtype!r} is none of {list(ACTIVATION_DTYPES)}")
        layers = self._layers(self._list(root, "layers", "the manifest", MAX_LAYERS))
        return Manifest(model_type, dtype, layers, self._files(root.get("files")))

    def _json(self, data: bytes) -> Any:
        if len(data) > MAX_MANIFEST:
            self._refuse(f"it is {len(data)} bytes long, more than the {MAX_MANIFEST} allowed")
        try:
            return json.loads(bytes(data))
        except (ValueError, RecursionError) as error:
            self._refuse(f"it is not JSON ({error})")

    def _version(self, root: dict[str, Any]) -> None:
        if root.get("format") != FORMAT:
            self._refuse(f"its format is {root.get('format')!r}, not {FORMAT!r}")
        version = root.get("version")
        if version == VERSION:
            return
        newer = isinstance(version, int) and version > VERSION
        raise StoreError(
            self._where,
            f"the store has format version {version!r} and this program reads version {VERSION}",
            "upgrade expert-network" if newer else "convert the checkpoint again",
        )

    def _layers(self, items: list[Any]) -> tuple[LayerSpec, ...]:
        layers = tuple(self._layer(item) for item in items)
        numbers = [spec.layer for spec in layers]
        if not layers:
            self._refuse("it has no MoE layer")
        if numbers != sorted(set(numbers)):
            self._refuse("its layers are not in ascending order")
        if len({spec.path for spec in layers}) != len(layers):
            self._refuse("two of its layers have the same path")
        return layers

    def _layer(self, item: Any) -> LayerSpec:
        fields = self._fields(item, "a layer")
        layer = self._integer(fields, "layer", "a layer", 0, MAX_LAYER)
        what = f"layer {layer}"
        path = self._text(fields, "path", what)
        if not _MODULE_PATH.fullmatch(path):
            self._refuse(f"{what} has the module path {path!r}")
        experts = self._integer(fields, "experts", what, 1, MAX_EXPERTS)
        block_bytes = self._integer(fields, "block_bytes", what, 1, MAX_BLOCK)
        stride = self._integer(fields, "stride", what, 1, 2 * MAX_BLOCK)
        if stride != align(block_bytes, ALIGNMENT):
            self._refuse(f"{what} has stride {stride} for blocks of {block_bytes} bytes")
        return LayerSpec(
            layer,
            path,
            experts,
            self._integer(fields, "hidden", what, 1, MAX_HIDDEN),
            self._tensors(self._list(fields, "tensors", what, MAX_TENSORS), block_bytes, what),
            block_bytes,
            stride,
            self._digests(self._list(fields, "sha256", what, MAX_EXPERTS), experts, what),
        )

    def _tensors(self, items: list[Any], block_bytes: int, what: str) -> tuple[TensorSpec, ...]:
        tensors = tuple(self._tensor(item, what) for item in items)
        names = [tensor.name for tensor in tensors]
        if not tensors or names != sorted(set(names)):
            self._refuse(f"{what} has no tensors, or not in ascending order of name")
        end = 0
        for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                self._refuse(f"{what}: {tensor.name} overlaps the tensor before it")
            if tensor.offset % TENSOR_ALIGNMENT:
                self._refuse(f"{what}: {tensor.name} starts at {tensor.offset}, unaligned")
            end = tensor.offset + tensor.nbytes
        if end > block_bytes:
            self._refuse(f"{what}: its tensors end at {end}, outside the block of {block_bytes}")
        return tensors

    def _tensor(self, item: Any, layer: str) -> TensorSpec:
        fields = self._fields(item, f"a tensor of {layer}")
        name = self._text(fields, "name", f"a tensor of {layer}")
        what = f"{layer}: {name}"
        if not _MODULE_PATH.fullmatch(name):
            self._refuse(f"{what} is not a tensor's name")
        dtype = self._text(fields, "dtype", what)
        if dtype not in DTYPES:
            self._refuse(f"{what} has the unknown dtype {dtype!r}")
        shape = tuple(self._list(fields, "shape", what, MAX_RANK))
        if not all(type(extent) is int and 1 <= extent <= MAX_BLOCK for extent in shape):
            self._refuse(f"{what} has the shape {list(shape)}")
        nbytes = self._integer(fields, "nbytes", what, 1, MAX_BLOCK)
        if nbytes != tensor_bytes(dtype, shape):
            self._refuse(f"{what} has {nbytes} bytes, not what {dtype} {list(shape)} takes")
        return TensorSpec(
            name, dtype, shape, self._integer(fields, "offset", what, 0, MAX_BLOCK), nbytes
        )

    def _files(self, item: Any) -> Mapping[str, FileSpec]:
        fields = self._fields(item, "files")
        if len(fields) > MAX_FILES:
            self._refuse(f"it lists {len(fields)} files, more than the {MAX_FILES} allowed")
        files = {name: self._file(name, value) for name, value in sorted(fields.items())}
        if len({name.casefold() for name in files}) < len(files):
            self._refuse("it lists two files whose names differ in case alone")
        for name in (CONFIG, TRUNK):
            if name not in files:
                self._refuse(f"it does not list {name}")
        return MappingProxyType(files)

    def _file(self, name: str, item: Any) -> FileSpec:
        if not is_file_name(name):
            self._refuse(f"it lists {name!r}, which is not a plain file name of a store")
        fields = self._fields(item, name)
        size = self._integer(fields, "size", name, 0, MAX_FILE)
        return FileSpec(size, self._digests([fields.get("sha256")], 1, name)[0])

    def _digests(self, items: list[Any], count: int, what: str) -> tuple[str, ...]:
        if len(items) != count:
            self._refuse(f"{what} has {len(items)} sha256 for {count} blocks")
        for item in items:
            if not isinstance(item, str) or not _SHA256.fullmatch(item):
                self._refuse(f"{what} has {str(item)[:80]!r} for a sha256")
        return tuple(items)

    def _fields(self, item: Any, what: str) -> dict[str, Any]:
        if not isinstance(item, dict):
            self._refuse(f"{what} is not a JSON object")
        return item

    def _list(self, fields: dict[str, Any], key: str, what: str, most: int) -> list[Any]:
        value = fields.get(key)
        if not isinstance(value, list) or len(value) > most:
            self._refuse(f"{what} has no list {key!r} of at most {most} entries")
        return value

    def _text(self, fields: dict[str, Any], key: str, what: str) -> str:
        value = fields.get(key)
        if not isinstance(value, str) or not 0 < len(value) <= 256:
            self._refuse(f"{what} has no text {key!r}")
        return value

    def _integer(self, fields: dict[str, Any], key: str, what: str, least: int, most: int) -> int:
        value = fields.get(key)
        if type(value) is not int or not least <= value <= most:
            self._refuse(f"{what} has no integer {key!r} from {least} to {most}")
        return value

    def _refuse(self, problem: str) -> NoReturn:
        raise StoreError(self._where, f"the manifest is damaged: {problem}", _REWRITE)


def is_digest(text: str) -> bool:
    """Whether this is how a sha256 is written."""
    return bool(_SHA256.fullmatch(text))


def is_file_name(name: str) -> bool:
    """Whether a file of this name may stand beside the manifest: plain, and not the manifest."""
    return bool(_FILE_NAME.fullmatch(name)) and name.casefold() not in (MANIFEST, BLOCKS)


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes that a tensor takes."""
    count = DTYPES[dtype]
    for extent in shape:
        count *= extent
    return count


def lay_out(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]],
) -> tuple[tuple[TensorSpec, ...], int]:
    """Place (name, dtype, shape) one after the other, by name; the specs and the block's bytes."""
    specs, end = [], 0
    for name, dtype, shape in sorted(tensors):
        offset, nbytes = align(end, TENSOR_ALIGNMENT), tensor_bytes(dtype, shape)
        specs.append(TensorSpec(name, dtype, shape, offset, nbytes))
        end = offset + nbytes
    return tuple(specs), end

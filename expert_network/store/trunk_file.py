"""The trunk's file: safetensors whose bytes depend on the tensors alone, made piece by piece.

The safetensors library wants all tensors in memory at once; here each is asked for when its turn
comes. Wide dtypes come first, and names in order, so that every tensor is aligned to its elements.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

# safetensors' name and the bytes per element, by the name MLX gives the type.
_DTYPES = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "uint16": ("U16", 2),
    "int16": ("I16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "uint32": ("U32", 4),
    "int32": ("I32", 4),
    "float32": ("F32", 4),
    "uint64": ("U64", 8),
    "int64": ("I64", 8),
}


@dataclass(frozen=True)
class TensorSource:
    """A tensor that is not in memory yet; `read` gives its bytes, row-major and little-endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], memoryview]

    @property
    def nbytes(self) -> int:
        """Bytes that `read` will give."""
        count = _DTYPES[self.dtype][1]
        for extent in self.shape:
            count *= extent
        return count


def serialize(tensors: Iterable[TensorSource]) -> Iterator[bytes | memoryview]:
    """The file, in pieces: the header, then each tensor. Raises KeyError for an unknown dtype."""
    ordered = sorted(tensors, key=lambda tensor: (-_DTYPES[tensor.dtype][1], tensor.name))
    yield header(ordered)
    for tensor in ordered:
        yield tensor.read()


def header(ordered: list[TensorSource]) -> bytes:
    """Length and JSON of tensors that will follow in this order."""
    # mlx-lm marks what it saved itself this way; some families look at it before they rename.
    fields: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for tensor in ordered:
        start, end = end, end + tensor.nbytes
        fields[tensor.name] = {
            "dtype": _DTYPES[tensor.dtype][0],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text

"""The trunk's file: what the safetensors library reads, byte for byte the same each time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from expert_network.store.trunk_file import TensorSource, serialize

TENSORS: dict[str, npt.NDArray[Any]] = {
    "b.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a.scales": np.arange(4, dtype=np.float16),
    "c": np.array(7, dtype=np.int64),
    "a.weight": np.arange(8, dtype=np.uint32).reshape(2, 2, 2),
    "flags": np.array([True, False]),
}


def source(name: str, array: npt.NDArray[Any]) -> TensorSource:
    dtype = "bool" if array.dtype == np.bool_ else str(array.dtype)
    return TensorSource(name, dtype, array.shape, lambda: memoryview(array.tobytes()))


def test_the_library_reads_it(tmp_path: Path) -> None:
    """The safetensors library finds every tensor with its values, and mlx-lm's mark."""
    path = tmp_path / "trunk.safetensors"
    path.write_bytes(b"".join(serialize(source(*item) for item in TENSORS.items())))
    with safe_open(path, "np") as file:
        assert file.metadata() == {"format": "mlx"}
        assert set(file.keys()) == set(TENSORS)
        for name, array in TENSORS.items():
            np.testing.assert_array_equal(file.get_tensor(name), array)


def test_bfloat16_travels_as_its_bits(tmp_path: Path) -> None:
    """bfloat16, which numpy lacks, is read by MLX as it was."""
    array = mx.array([1.0, -2.5, float("inf"), 3e38], dtype=mx.bfloat16)
    bits = np.asarray(array.view(mx.uint16))
    path = tmp_path / "trunk.safetensors"
    tensor = TensorSource("x", "bfloat16", (4,), lambda: memoryview(bits.tobytes()))
    path.write_bytes(b"".join(serialize([tensor])))
    loaded: Any = mx.load(str(path))
    assert loaded["x"].tolist() == array.tolist()


@given(st.permutations(sorted(TENSORS)))
def test_the_order_given_does_not_show(names: list[str]) -> None:
    """The bytes depend on the tensors alone, and every tensor is aligned to its elements."""
    data = b"".join(serialize(source(name, TENSORS[name]) for name in names))
    assert data == b"".join(serialize(source(name, TENSORS[name]) for name in TENSORS))
    end = 8 + int.from_bytes(data[:8], "little")
    for name, fields in json.loads(data[8:end]).items():
        if name != "__metadata__":
            assert (end + fields["data_offsets"][0]) % TENSORS[name].itemsize == 0


def test_one_tensor_at_a_time() -> None:
    """A tensor is asked for when its turn has come, and not before."""
    asked: list[str] = []

    def lazy(name: str) -> TensorSource:
        def read() -> memoryview:
            asked.append(name)
            return memoryview(name.encode())

        return TensorSource(name, "uint8", (1,), read)

    pieces = serialize([lazy("b"), lazy("a")])
    next(pieces)
    assert asked == []
    assert bytes(next(pieces)) == b"a"
    assert asked == ["a"]


def test_an_unknown_dtype_is_refused() -> None:
    """What safetensors has no name for is not written as something else."""
    with pytest.raises(KeyError):
        list(serialize([TensorSource("x", "complex64", (1,), lambda: memoryview(bytes(8)))]))

"""The manifest: canonical bytes out, and nothing unsound in."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert_network.errors import StoreError
from expert_network.store import manifest as module
from expert_network.store.manifest import (
    DTYPES,
    MAX_MANIFEST,
    TENSOR_ALIGNMENT,
    FileSpec,
    Manifest,
    canonical,
    is_file_name,
    lay_out,
)
from tests.support.stores import layer_spec

FILES = {
    "config.json": FileSpec(20, "a" * 64),
    "trunk.safetensors": FileSpec(1000, "b" * 64),
}
MANIFEST = Manifest("made_up", "bfloat16", (layer_spec(0, 2), layer_spec(3, 2)), FILES)
JSON = json.loads(MANIFEST.to_bytes())

Change = Callable[[dict[str, Any]], Any]


def changed(change: Change) -> bytes:
    value = copy.deepcopy(JSON)
    change(value)
    return canonical(value)


def test_round_trip() -> None:
    """What is written is read back equal, with the same digest."""
    again = Manifest.from_bytes(MANIFEST.to_bytes(), "here")
    assert again == MANIFEST
    assert again.digest == hashlib.sha256(MANIFEST.to_bytes()).hexdigest()


def test_the_example_in_the_docs() -> None:
    """docs/store-format.md shows a manifest that is read, with the digest that it states."""
    page = (Path(__file__).parents[2] / "docs" / "store-format.md").read_text()
    example = json.loads(page.partition("```json\n")[2].partition("```")[0])
    manifest = Manifest.from_bytes(canonical(example), "docs")
    assert manifest.digest in page
    assert manifest.layer(3).file == "bin/layer_03.bin"


def test_files_in_any_order_give_the_same_bytes() -> None:
    """The order in which files were added does not show."""
    other = Manifest("made_up", "bfloat16", MANIFEST.layers, dict(reversed(FILES.items())))
    assert other.to_bytes() == MANIFEST.to_bytes()


def test_what_it_says_of_the_model() -> None:
    """Shape, counts and places follow from the layers."""
    spec = MANIFEST.layer(3)
    assert MANIFEST.shape == [(0, 2), (3, 2)]
    assert MANIFEST.block_count == 4
    assert spec.file == "bin/layer_03.bin"
    assert spec.offset(1) == spec.stride == 32768
    assert MANIFEST.total_bytes == 4 * 32768 + 1020
    with pytest.raises(KeyError):
        MANIFEST.layer(1)


@pytest.mark.parametrize(
    ("version", "advice"), [(2, "upgrade expert-network"), (0, "convert the checkpoint again")]
)
def test_another_version_is_named(version: int, advice: str) -> None:
    """A store of another format version is refused with both numbers and what to do."""
    data = changed(lambda m: m.update(version=version))
    with pytest.raises(StoreError, match=f"version {version} .* reads version 1; {advice}"):
        Manifest.from_bytes(data, "store/manifest.json")


CHANGES: dict[str, Change] = {
    "another format": lambda m: m.update(format="else"),
    "no model type": lambda m: m.pop("model_type"),
    "an activation dtype that is no float": lambda m: m.update(dtype="uint32"),
    "no layers": lambda m: m.update(layers=[]),
    "layers out of order": lambda m: m["layers"].reverse(),
    "a layer twice": lambda m: m["layers"].append(m["layers"][1]),
    "a path twice": lambda m: m["layers"][1].update(path=m["layers"][0]["path"]),
    "a path that is none": lambda m: m["layers"][0].update(path="../../etc"),
    "a layer that is no u16": lambda m: m["layers"][1].update(layer=65536),
    "a layer that is a bool": lambda m: m["layers"][1].update(layer=True),
    "no experts": lambda m: m["layers"][0].update(experts=0, sha256=[]),
    "more experts than sha256": lambda m: m["layers"][0].update(experts=3),
    "absurdly many experts": lambda m: m["layers"][0].update(experts=2**40),
    "an absurd hidden size": lambda m: m["layers"][0].update(hidden=2**31),
    "a stride that is not the block's": lambda m: m["layers"][0].update(stride=16384),
    "a block shorter than its tensors": lambda m: m["layers"][0].update(block_bytes=18000),
    "no tensors": lambda m: m["layers"][0].update(tensors=[]),
    "a tensor twice": lambda m: m["layers"][0]["tensors"].append(m["layers"][0]["tensors"][-1]),
    "tensors that overlap": lambda m: m["layers"][0]["tensors"][1].update(offset=0),
    "a tensor that is not aligned": lambda m: m["layers"][0]["tensors"][3].update(offset=12610),
    "a tensor before the block": lambda m: m["layers"][0]["tensors"][0].update(offset=-64),
    "an unknown dtype": lambda m: m["layers"][0]["tensors"][0].update(dtype="float8"),
    "a shape that is not its bytes": lambda m: m["layers"][0]["tensors"][0].update(shape=[65]),
    "a negative extent": lambda m: m["layers"][0]["tensors"][0].update(shape=[-64]),
    "an extent that is no integer": lambda m: m["layers"][0]["tensors"][0].update(shape=[64.0]),
    "too many axes": lambda m: m["layers"][0]["tensors"][0].update(shape=[64, 1, 1, 1, 1]),
    "a name that is a path": lambda m: m["layers"][0]["tensors"][0].update(name="a/b"),
    "a sha256 that is none": lambda m: m["layers"][0].update(sha256=["00", "11"]),
    "a sha256 in capitals": lambda m: m["layers"][0].update(sha256=["A" * 64, "B" * 64]),
    "no config": lambda m: m["files"].pop("config.json"),
    "no trunk": lambda m: m["files"].pop("trunk.safetensors"),
    "a negative size": lambda m: m["files"]["config.json"].update(size=-1),
    "a file without sha256": lambda m: m["files"]["config.json"].pop("sha256"),
    "files that are a list": lambda m: m.update(files=[]),
    "an unknown field": lambda m: m.update(colour="red"),
    "a parent's file": lambda m: m["files"].update({"../x": m["files"]["config.json"]}),
    "an absolute file": lambda m: m["files"].update({"/x": m["files"]["config.json"]}),
    "one name in two cases": lambda m: m["files"].update(
        {"Config.json": m["files"]["config.json"]}
    ),
    "itself in capitals": lambda m: m["files"].update({"MANIFEST.json": m["files"]["config.json"]}),
    "itself as a file": lambda m: m["files"].update({"manifest.json": m["files"]["config.json"]}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_an_unsound_manifest_is_refused(what: str) -> None:
    """A manifest with one thing wrong is refused, and the sentence says where it came from."""
    with pytest.raises(StoreError, match=r"^store/manifest\.json: ") as caught:
        Manifest.from_bytes(changed(CHANGES[what]), "store/manifest.json")
    # Each is caught by its own check; only what no field says is left to the canonical form.
    assert ("canonical" in caught.value.problem) == (what == "an unknown field")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"version":' + b"9" * 5000 + b"}",
        json.dumps(JSON, indent=1).encode(),
        MANIFEST.to_bytes() + b"\n",
    ],
)
def test_what_is_not_canonical_json_is_refused(data: bytes) -> None:
    """Bytes that are no JSON, or another spelling of it than ours, are refused."""
    with pytest.raises(StoreError):
        Manifest.from_bytes(data, "here")


def test_the_size_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest that is absurdly long is refused before it is parsed."""
    monkeypatch.setattr(module, "MAX_MANIFEST", 100)
    with pytest.raises(StoreError, match="bytes long, more than the 100 allowed"):
        Manifest.from_bytes(MANIFEST.to_bytes(), "here")
    assert MAX_MANIFEST > 61 * 384 * 70


@given(st.binary(max_size=200))
def test_garbage_is_a_store_error(data: bytes) -> None:
    """Any bytes are either a manifest or a StoreError, nothing else."""
    with pytest.raises(StoreError):
        Manifest.from_bytes(data, "here")


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=5,
)


@given(st.data(), _VALUES)
def test_any_field_may_hold_anything(data: st.DataObject, value: Any) -> None:
    """Whatever stands in a field, the answer is the manifest itself or a StoreError."""
    root = copy.deepcopy(JSON)
    node: Any = root
    while True:
        keys = sorted(node) if isinstance(node, dict) else list(range(len(node)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(node[key], dict | list) or not node[key] or data.draw(st.booleans()):
            break
        node = node[key]
    node[key] = value
    raw = json.dumps(root, sort_keys=True, separators=(",", ":")).encode()
    try:
        assert Manifest.from_bytes(raw, "here").to_bytes() == raw
    except StoreError as error:
        assert str(error).startswith("here: ")


@given(
    st.dictionaries(
        st.from_regex(r"[a-z]{1,8}\.[a-z]{1,8}", fullmatch=True),
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(1, 40), max_size=3)),
        min_size=1,
        max_size=12,
    )
)
def test_a_layout_is_sound(tensors: dict[str, tuple[str, list[int]]]) -> None:
    """Tensors laid out are aligned, do not overlap, lie in the block, and depend on no order."""
    layout = [(name, dtype, tuple(shape)) for name, (dtype, shape) in tensors.items()]
    specs, size = lay_out(layout)
    assert lay_out(layout[::-1]) == (specs, size)
    end = 0
    for spec in specs:
        assert spec.offset % TENSOR_ALIGNMENT == 0
        assert end <= spec.offset < end + TENSOR_ALIGNMENT
        assert spec.nbytes == DTYPES[spec.dtype] * math.prod(spec.shape)
        end = spec.offset + spec.nbytes
    assert end == size


@pytest.mark.parametrize("name", ["tokenizer.json", "merges.txt", "a_b-c.1.model", "x"])
def test_names_that_a_store_may_hold(name: str) -> None:
    """Plain file names are fine."""
    assert is_file_name(name)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", ".hidden", "a/b", "a\\b", "a\0b", "bin", "manifest.json", "é", "a" * 200],
)
def test_names_that_it_may_not(name: str) -> None:
    """Nothing that could leave the folder, hide in it or stand for something else in it."""
    assert not is_file_name(name)

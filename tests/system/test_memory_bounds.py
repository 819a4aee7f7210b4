"""Nobody holds what it should not: peak memory of conversion, driver and nodes.

With EXPERT_TESTS_FULL=1 on a checkpoint and a store of 3 GB and in every mode, else of 0.6 GB.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from expert_network.store.manifest import TRUNK
from expert_network.store.reader import Store
from tests.driver.programs import COMMAND, environment
from tests.support.measuring import peak_of
from tests.support.nodes import NodeProcess, node_processes
from tests.support.synthetic import make_checkpoint, of_size
from tests.system.sessions import FULL

BYTES = 3_000_000_000 if FULL else 600_000_000
MB = 1_000_000
PROMPT = ",".join(str(3 + n * 37 % 8000) for n in range(200 if FULL else 60))
MODES: list[tuple[str, ...]] = [(), ("--exact",), ("--wire", "f32")]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    folder = tmp_path_factory.mktemp("synthetic")
    checkpoint = make_checkpoint(folder / "checkpoint", of_size(BYTES))
    peak = peak_of([*COMMAND, "preprocess", checkpoint, folder / "store"], environment())
    print(f"preprocess peaks at {peak / MB:.0f} MB")
    assert peak < 1200 * MB
    for file in checkpoint.iterdir():
        file.unlink()
    yield Store.open(folder / "store")


@pytest.fixture(scope="module")
def nodes(store: Store) -> Iterator[list[NodeProcess]]:
    with node_processes("a,b", store.path) as started:
        yield started


def test_preprocess_and_store(store: Store) -> None:
    """Converting a 3 GB bfloat16 checkpoint peaks under 1.2 GB, and makes the store whole."""
    assert sum(layer.experts * layer.block_bytes for layer in store.manifest.layers) >= BYTES


def check_nodes(nodes: list[NodeProcess], when: str) -> None:
    for node in nodes:
        status = node.get("/status")
        peak, held = status["peak_rss_bytes"], status["partition"]["bytes"]
        print(f"{when}: {status['name']} holds {held / MB:.0f} MB, peak {peak / MB:.0f} MB")
        assert held > BYTES * 0.4
        assert peak < held + 300 * MB


def test_node_while_loading(nodes: list[NodeProcess]) -> None:
    """A node's peak stays under its partition + 300 MB while it loads."""
    check_nodes(nodes, "loading")


@pytest.mark.parametrize("mode", MODES if FULL else MODES[:1])
def test_driver_and_nodes_while_serving(
    store: Store, nodes: list[NodeProcess], tmp_path: Path, mode: tuple[str, ...]
) -> None:
    """The driver peaks under trunk + 400 MB, the nodes under partition + 300 MB, over a prompt."""
    urls = ",".join(node.url for node in nodes)
    arguments: list[str | Path] = [
        "logits",
        store.path,
        "--ids",
        PROMPT,
        "-o",
        tmp_path / "out.npy",
    ]
    peak = peak_of([*COMMAND, *arguments, "--nodes", urls, *mode], environment())
    trunk = store.manifest.files[TRUNK].size
    print(f"driver {mode}: trunk {trunk / MB:.0f} MB, peak {peak / MB:.0f} MB")
    assert peak < trunk + 400 * MB
    check_nodes(nodes, f"serving {json.dumps(mode)}")

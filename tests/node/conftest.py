"""Stores and nodes that the tests of the node share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from expert_network.store.convert import preprocess
from expert_network.store.reader import Store
from tests.support.nodes import NodeProcess, node_process

GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A tiny qwen3_moe of two layers of eight experts. Not to be changed."""
    return preprocess(GOLDEN / "qwen3_moe", tmp_path_factory.mktemp("stores") / "qwen3_moe")


@pytest.fixture(scope="session")
def node(store: Store) -> Iterator[NodeProcess]:
    """Node a of the roster a,b. Not to be stopped."""
    with node_process("a,b", "a", store.path) as process:
        yield process

"""Golden checkpoints over node processes: the logits of transformers, and of one process.

With EXPERT_TESTS_FULL=1 every family of tests/golden, else those that the node cannot tell apart
by their experts are left to tests/network/test_golden.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from expert_network.store.convert import preprocess
from tests.support.nodes import NodeProcess, node_processes
from tests.system.sessions import FULL, roster_of, session

GOLDEN = Path(__file__).parents[1] / "golden"
SHORT = ("deepseek_v3", "glm4_moe", "gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
ALL = sorted(path.name for path in GOLDEN.iterdir() if (path / "reference.npz").is_file())
FAMILIES = ALL if FULL else SHORT
NODES = (1, 2, 3, 5)
ROPE = ("rope_theta", "rope_scaling", "partial_rotary_factor", "rope_local_base_freq")

Logits = npt.NDArray[np.float32]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def reference(family: str) -> tuple[list[list[int]], Logits]:
    """Token ids (2, 24) and the logits (2, 24, vocabulary) that transformers gave for them."""
    with np.load(GOLDEN / family / "reference.npz") as file:
        return file["input_ids"].tolist(), file["logits"]


@pytest.fixture(scope="module")
def store(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return preprocess(GOLDEN / family, tmp_path_factory.mktemp(family) / "store").path


def logits(ids: list[list[int]], store: Path, nodes: list[NodeProcess], **options: Any) -> Logits:
    with session(store, nodes, **options) as opening:
        return np.stack([opening.engine.logits(row) for row in ids])


@pytest.fixture(scope="module")
def alone(store: Path, reference: tuple[list[list[int]], Logits]) -> Logits:
    """The logits of one process that holds all experts."""
    return logits(reference[0], store, [])


@pytest.fixture(scope="module", params=NODES)
def nodes(request: pytest.FixtureRequest, store: Path) -> Iterator[list[NodeProcess]]:
    with node_processes(roster_of(request.param), store) as started:
        yield started


def test_transformers_logits(
    store: Path, nodes: list[NodeProcess], reference: tuple[list[list[int]], Logits]
) -> None:
    """Sum mode with f32 on the wire is within 1e-4 of transformers over 1, 2, 3 and 5 nodes."""
    ids, expected = reference
    assert np.abs(logits(ids, store, nodes, wire="f32") - expected).max() <= 1e-4


def test_exact_is_one_process(
    store: Path,
    nodes: list[NodeProcess],
    alone: Logits,
    reference: tuple[list[list[int]], Logits],
) -> None:
    """Exact mode gives the very bits of the one-process run over 1, 2, 3, 5 nodes."""
    found = logits(reference[0], store, nodes, exact=True)
    assert found.tobytes() == alone.tobytes()
    assert np.abs(found - reference[1]).max() <= 1e-4


def test_without_top_level_rope_keys(
    family: str, alone: Logits, reference: tuple[list[list[int]], Logits], tmp_path: Path
) -> None:
    """A config whose rope keys stand under rope_parameters alone gives the same bits."""
    source = tmp_path / family
    shutil.copytree(GOLDEN / family, source)
    config = json.loads((source / "config.json").read_text())
    for key in ROPE:
        config.pop(key, None)
    (source / "config.json").write_text(json.dumps(config))
    stripped = preprocess(source, tmp_path / "store").path
    with ExitStack() as stack:
        pair = stack.enter_context(node_processes("a,b", stripped)) if FULL else []
        found = logits(reference[0], stripped, pair, exact=True)
    assert found.tobytes() == alone.tobytes()

"""A byte that is flipped in a node's memory is found, and named: node, layer and expert."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from expert_driver.cli import main
from expert_network.store.manifest import MANIFEST
from expert_network.store.reader import Store
from tests.driver.programs import DEMO_STORE
from tests.support.node_here import NodeHere, node_here
from tests.support.servers import unused_port

ALL = "1000"


@pytest.fixture(scope="module")
def nodes() -> Iterator[dict[str, NodeHere]]:
    """Two nodes of the demo's model, each with its part."""
    with node_here("a,b", "a", DEMO_STORE) as a, node_here("a,b", "b", DEMO_STORE) as b:
        yield {"a": a, "b": b}


def urls(nodes: dict[str, NodeHere]) -> str:
    return ",".join(node.url for node in nodes.values())


def output(node: NodeHere, layer: int, expert: int) -> bytes:
    """What an expert makes of a row of ones."""
    hidden = Store.open(DEMO_STORE).manifest.layer(layer).hidden
    ids, ones = np.array([expert], np.uint16), np.ones(1, np.float32)
    row, offsets = np.ones((1, hidden), np.float32), np.array([0, 1], np.uint32)
    return node.partition.compute(layer, 0, row, offsets, ids, ones).tobytes()


@contextmanager
def flipped(node: NodeHere, layer: int, expert: int) -> Iterator[None]:
    """One bit of the block is wrong in memory, and what is computed with it."""
    before, memory = output(node, layer, expert), node.memory(layer, expert)
    memory[5] ^= 0x40
    try:
        assert output(node, layer, expert) != before
        yield
    finally:
        memory[5] ^= 0x40
    assert output(node, layer, expert) == before


def test_sound_memories(nodes: dict[str, NodeHere], capsys: pytest.CaptureFixture[str]) -> None:
    """As many blocks of each node as were asked for are checked, with a store or without."""
    total, digest = sum(n.partition.blocks for n in nodes.values()), Store.open(DEMO_STORE).digest
    for words in ([], [str(DEMO_STORE)]):
        assert main(["verify", *words, "--nodes", urls(nodes), "--samples", "5"]) == 0
        said = capsys.readouterr().out
        assert (
            said == f"a, b: 10 of {total:,} blocks in memory checked, all sound, digest {digest}\n"
        )


@pytest.mark.parametrize("with_store", [False, True])
def test_a_flipped_bit_is_named(
    nodes: dict[str, NodeHere], with_store: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The node, the layer and the expert are named once, and the exit code is a bad store's."""
    expert = int(nodes["b"].partition.owned(3)[1])
    words = [str(DEMO_STORE)] if with_store else []
    with flipped(nodes["b"], 3, expert):
        assert main(["verify", *words, "--nodes", urls(nodes), "--samples", ALL]) == 3
    out, err = capsys.readouterr()
    assert err.splitlines()[-1] == (
        f"error: node b has a damaged block (3, {expert}) in memory; start it again, and if that "
        "comes back, test that machine's memory."
    )
    assert err.count("error:") == 1 and out == "a, b: 1 problem\n"


def test_a_node_alone_cannot_hide_it(
    nodes: dict[str, NodeHere], capsys: pytest.CaptureFixture[str]
) -> None:
    """Where nobody else has the block, what the node itself sends gives it away."""
    expert = int(nodes["b"].partition.owned(0)[0])
    with flipped(nodes["b"], 0, expert):
        assert main(["verify", "--nodes", nodes["b"].url, "--samples", ALL]) == 3
    assert f"node b has a damaged block (0, {expert})" in capsys.readouterr().err


def test_another_model(
    nodes: dict[str, NodeHere], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A store of another model is no measure."""
    text = (
        (DEMO_STORE / MANIFEST)
        .read_text()
        .replace('"dtype":"bfloat16","files"', '"dtype":"float16","files"')
    )
    (tmp_path / MANIFEST).write_text(text)
    assert main(["verify", str(tmp_path), "--nodes", urls(nodes)]) == 4
    assert "the nodes hold another model" in capsys.readouterr().err


def test_bad_words(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing to verify is a wrong command line; a node that is not there, an error of nodes."""
    assert main(["verify"]) == 2
    assert "Say what is to be verified" in capsys.readouterr().err
    assert main(["verify", "--nodes", f"127.0.0.1:{unused_port()}"]) == 4
    assert "nothing listens" in capsys.readouterr().err

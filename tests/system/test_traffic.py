"""What crosses the network per token, counted at the sockets."""

from __future__ import annotations

from pathlib import Path

import pytest

from expert_driver.config import Sampling
from expert_network.store.convert import preprocess
from tests.support.nodes import node_processes
from tests.support.synthetic import Shape, make_checkpoint
from tests.system.sessions import session

#: What crosses depends on these alone: OLMoE-1B-7B's, with experts that are narrower.
OLMOE = Shape("olmoe", 16, 64, 8, hidden=2048, intermediate=64, heads=16, vocab=512)
TOKENS = 20


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("olmoe")
    return preprocess(make_checkpoint(folder / "checkpoint", OLMOE), folder / "store", bits=4).path


def test_olmoe_over_two_nodes(store: Path) -> None:
    """OLMoE's shape over two nodes in sum mode with bf16: at most 0.27 MB per token."""
    with node_processes("a,b", store) as nodes, session(store, nodes) as opening:
        assert opening.network is not None
        context = opening.engine.context()
        opening.engine.prefill(context, [1])
        before = opening.network.traffic
        sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
        # The prompt's last token makes the first pass: TOKENS passes for as many tokens.
        assert len(list(opening.engine.generate([1, 2], context, sampling))) == TOKENS
        per_token = (opening.network.traffic - before) / TOKENS
    print(f"{per_token / 1e6:.4f} MB per token")
    assert 0.2e6 < per_token <= 0.27e6

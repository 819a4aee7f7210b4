"""A tiny model in this process whose experts are on two nodes that are told what to do."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from expert_driver.dispatch.agreement import Wanted
from expert_driver.engine import Engine
from expert_driver.passes.passes import Passes
from expert_network.model.seam import Mode, install
from expert_protocol.dtypes import WireDType
from tests.driver import tiny
from tests.driver.dispatch.asking import experts_of, nodes_of
from tests.driver.fakes import DIGEST, HIDDEN, FakeNode

LAYERS = 2


@contextmanager
def remote(mode: Mode = "sum") -> Iterator[tuple[Engine, list[FakeNode]]]:
    """An engine, and its nodes behind real sockets, which keep their last dispatch only."""
    shape = [(layer, 4) for layer in range(LAYERS)]
    wanted = Wanted(DIGEST, shape, "float32", mode == "exact", WireDType.F32, row_bytes=72)
    with nodes_of("a", "b") as nodes, experts_of(nodes, wanted) as experts:
        for node in nodes:
            node.dispatches = deque(maxlen=1)  # type: ignore[assignment]
        model, passes = tiny.qwen(hidden=HIDDEN), Passes()
        install(model, passes.attend(experts), mode)
        yield Engine(model, frozenset(), passes), nodes

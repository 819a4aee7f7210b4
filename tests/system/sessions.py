"""A driver in this process over nodes that are real processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from expert_driver.config import Computing, NetworkConfig
from expert_driver.opening import Session, opened
from tests.support.nodes import NodeProcess

#: `python -m pytest` runs what fits the suite; with this set, what the documents promise in full.
FULL = bool(os.environ.get("EXPERT_TESTS_FULL"))

F32 = Computing("f32")


@contextmanager
def session(
    store: Path,
    nodes: Sequence[NodeProcess] = (),
    *,
    exact: bool = False,
    wire: str | None = None,
    text: bool = False,
) -> Iterator[Session]:
    """The model of `store`, in float32: its experts on `nodes` in the order given.

    Without nodes they are here, in exact mode: what all other runs are measured against.
    """
    urls = tuple(node.url for node in nodes)
    config = NetworkConfig(
        urls, exact or not nodes, wire, key=None, home=Path("/nowhere"), computing=F32
    )
    with opened(str(store), config, with_text=text) as opening:
        yield opening


def roster_of(count: int) -> str:
    """A roster of `count` nodes: "a,b,c" for 3."""
    return ",".join("abcdefgh"[:count])

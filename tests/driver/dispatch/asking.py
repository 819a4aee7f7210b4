"""Dispatches of a few rows over fake nodes, and what they must give."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from threading import Event
from typing import Any

import mlx.core as mx
import numpy as np

from expert_driver.dispatch.agreement import Wanted
from expert_driver.dispatch.dispatcher import NetworkExperts
from expert_driver.dispatch.links import Opener
from expert_driver.dispatch.network import Network
from expert_protocol.dtypes import WireDType
from expert_protocol.frames import Dispatch, Hello
from expert_protocol.header import VERSION
from tests.driver.fakes import DIGEST, HIDDEN, FakeLink, FakeNode, answer

SHAPE = [(3, 8)]
LAYER = 3
HELLO = Hello(VERSION, DIGEST, None, 0, (WireDType.F32,), "fake", False)
WANTED = Wanted(DIGEST, SHAPE, "float32", False, WireDType.F32, row_bytes=72)

X = np.random.default_rng(5).normal(size=(6, HIDDEN)).astype(np.float32)
IDS = np.array([[0, 1, 2], [3, 4, 5], [6, 7, 0], [1, 3, 5], [2, 4, 6], [7, 0, 1]], np.uint32)
WEIGHTS = np.random.default_rng(6).random(IDS.shape).astype(np.float32)


@contextmanager
def nodes_of(*names: str, **welcome: Any) -> Iterator[list[FakeNode]]:
    with ExitStack() as stack:
        made = [FakeNode(name, ",".join(sorted(names)), **welcome) for name in names]
        for node in made:
            stack.callback(node.stop)
        yield made


@contextmanager
def experts_of(nodes: list[FakeNode], wanted: Wanted = WANTED) -> Iterator[NetworkExperts]:
    opener = Opener(None, replace(HELLO, dtypes=(wanted.wire,)), lambda layer: HIDDEN)
    connected = Network([node.url for node in nodes], wanted, opener.open)
    try:
        yield NetworkExperts(connected)
    finally:
        connected.close()


def summed(experts: NetworkExperts, rows: int = len(X)) -> np.ndarray[Any, Any]:
    x, ids, weights = mx.array(X[:rows]), mx.array(IDS[:rows]), mx.array(WEIGHTS[:rows])
    return np.array(experts.weighted_sum(LAYER, x, ids, weights))


def separate(experts: NetworkExperts, rows: int = len(X)) -> np.ndarray[Any, Any]:
    return np.array(experts.outputs(LAYER, mx.array(X[:rows]), mx.array(IDS[:rows])))


OUTPUTS = X[:, None, :] * (IDS[:, :, None].astype(np.float32) + 1)
SUM = (OUTPUTS * WEIGHTS[..., None]).sum(1)


def failing(node: FakeNode, behave: Any) -> Event:
    """Let `node` do `behave` once, and answer from then on; the event says that it was asked."""
    met = Event()

    def once(link: FakeLink, dispatch: Dispatch) -> None:
        node.behave = answer
        met.set()
        behave(link, dispatch)

    node.behave = once
    return met

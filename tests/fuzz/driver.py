"""A driver one of whose nodes sends what no honest node would, in place of a reply.

It takes what is a reply or fails with an error of ours, and is right again when it asks anew.
"""

from __future__ import annotations

from functools import partial
from random import Random
from time import perf_counter
from typing import Any

import mlx.core as mx
import numpy as np

from expert_driver.dispatch.dispatcher import NetworkExperts
from expert_network.errors import NetworkMismatch, NodeError
from expert_protocol.frames import (
    Dispatch,
    ErrorCode,
    ErrorReply,
    Goodbye,
    encode_error,
    encode_goodbye,
    encode_working,
)
from tests.driver.dispatch.asking import LAYER, experts_of, nodes_of
from tests.driver.fakes import HIDDEN, FakeLink, answer, computed
from tests.fuzz.mutation import mutated_bytes, mutated_frame, noise
from tests.fuzz.running import Hang, Outcome, patience, peak

#: Rows of a dispatch, of which one goes and comes natively.
_ROWS = (1, 1, 1, 6)


def run_driver(count: int, seed: int) -> Outcome:
    """Send `count` replies to a driver in this process, each in answer to a dispatch."""
    outcome, random = Outcome("replies to a driver"), Random(f"{seed} driver")
    began, memory = perf_counter(), peak()
    with nodes_of("a", "b") as nodes, experts_of(nodes) as experts:
        expected = {rows: _ask(experts, rows) for rows in set(_ROWS)}
        for _ in range(count):
            node, rows = random.choice(nodes), random.choice(_ROWS)
            sent: list[bytes] = []
            node.behave = partial(_misbehave, random, sent)
            try:
                with patience():
                    _ask(experts, rows)
                outcome.parsed += 1
            except (NodeError, NetworkMismatch):
                outcome.refused += 1
            except (Exception, Hang) as error:
                outcome.fail(error, b"".join(sent))
            node.behave = answer
            if not _right(experts, rows, expected[rows]):
                outcome.note("it is not right again", b"".join(sent))
            for one in nodes:
                del one.links[:-1], one.dispatches[:]
    outcome.seconds, outcome.growth = perf_counter() - began, peak() - memory
    return outcome


def _ask(experts: NetworkExperts, rows: int) -> bytes:
    """The weighted sums of `rows` rows over all experts of both nodes."""
    x = mx.arange(rows * HIDDEN, dtype=mx.float32).reshape(rows, HIDDEN)
    ids = mx.array(np.tile(np.arange(8, dtype=np.uint32), (rows, 1)))
    return np.array(experts.weighted_sum(LAYER, x, ids, mx.full(ids.shape, 0.25))).tobytes()


def _right(experts: NetworkExperts, rows: int, expected: bytes) -> bool:
    """Whether it gives the right sums; it may have to find out first that a link has ended."""
    try:
        return _ask(experts, rows) == expected
    except NodeError:
        return _ask(experts, rows) == expected


def _misbehave(random: Random, sent: list[bytes], link: FakeLink, dispatch: Dispatch) -> None:
    """Send a reply with something wrong, and reset the link."""
    right = link.connection.reply(computed(dispatch))
    sequence = int.from_bytes(right[0][8:12], "little")
    others: list[list[Any]] = [
        encode_error(ErrorReply(random.choice(list(ErrorCode)), "a sentence"), sequence),
        encode_working(sequence),
        encode_goodbye(Goodbye("bye")),
    ]
    frame = b"".join(right if random.random() < 0.7 else random.choice(others))
    chance = random.random()
    if chance < 0.05:
        data = noise(random)
    else:
        data = (mutated_frame if chance < 0.8 else mutated_bytes)(random, [frame])
    sent.append(data)
    link.sock.sendall(data)
    link.reset()

"""Nodes join and leave in the middle of a reply, and a network is given another roster."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from expert_driver.config import Sampling
from expert_driver.opening import Session
from expert_network import disk
from expert_network.store.reader import Store
from expert_roster.diff import diff
from expert_roster.roster import Roster
from tests.driver.programs import DEMO_STORE
from tests.support.nodes import READY, NodeProcess, node_processes, python_module
from tests.system.sessions import session

PROMPT = "Tell me about the network."
TOKENS = 200
#: At most between two tokens while something goes on beside them, so that it ends within the reply.
PACE_S = 0.5


def joiner(nodes: list[NodeProcess], me: str, folder: Path, *options: str) -> NodeProcess:
    """A node that takes itself into the network of `nodes`, with an empty folder for a store."""
    urls = ",".join(node.url for node in nodes)
    return NodeProcess(
        [
            *python_module(), "--join", urls, "--me", me, "--port", "0",
            "--store", str(folder), *options,
        ]
    )  # fmt: skip


def reply(opening: Session, *steps: tuple[int, Callable[[], Iterator[None]]]) -> list[int]:
    """The token ids of a greedy reply of TOKENS; from token n on a step goes on beside it.

    A step yields as long as it wants more tokens; the reply must outlast it.
    """
    assert opening.text is not None
    ids = opening.text.encode_chat([{"role": "user", "content": PROMPT}])
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
    waiting, said = list(steps), list[int]()
    going: Iterator[None] = iter(())
    for token in opening.engine.generate(ids, opening.engine.context(), sampling):
        said.append(token)
        if waiting and len(said) >= waiting[0][0] and next(going, going) is going:
            going = waiting.pop(0)[1]()
        elif not waiting:
            next(going, None)
    assert not waiting and next(going, going) is going, "the reply was over first"
    return said


@pytest.fixture(scope="module")
def alone() -> list[int]:
    """What one process says."""
    with session(DEMO_STORE, text=True) as opening:
        return reply(opening)


def until_ready(node: NodeProcess) -> Iterator[None]:
    """Until it prints its ready line."""
    assert node.process.stdout is not None
    deadline = monotonic() + READY
    while not select.select([node.process.stdout], [], [], PACE_S)[0]:
        assert node.process.poll() is None and monotonic() < deadline, node.story("did not join")
        yield
    node.wait_ready()


def until_left(node: NodeProcess) -> Iterator[None]:
    """SIGTERM, and until it has ended."""
    node.send(signal.SIGTERM)
    deadline = monotonic() + READY
    with pidfd(node) as ended:
        while not select.select([ended], [], [], PACE_S)[0]:
            assert monotonic() < deadline, node.story("did not leave")
            yield
    assert node.wait() == 0, node.story("did not leave in peace")


@contextmanager
def pidfd(node: NodeProcess) -> Iterator[int]:
    """Something to select on that is readable once the process has ended."""
    descriptor = os.pidfd_open(node.process.pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def roster_of(node: NodeProcess) -> tuple[int, list[str]]:
    said: Any = node.get("/roster")["roster"]
    return said["epoch"], [name for name, _ in said["nodes"]]


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="Linux waits so")
def test_join_and_leave_within_a_reply(alone: list[int], tmp_path: Path) -> None:
    """The tokens of one process, no failed request, and no byte moved but what the plan says."""
    store = Store.open(DEMO_STORE)
    sizes = {spec.layer: spec.block_bytes for spec in store.manifest.layers}
    plan = diff(Roster.parse("a,b"), Roster.parse("a,b,d"), store.manifest.shape)
    planned = plan.node_bytes(sizes)
    with ExitStack() as stack:
        nodes = stack.enter_context(node_processes("a,b", DEMO_STORE))
        opening = stack.enter_context(session(DEMO_STORE, nodes, exact=True, text=True))
        assert opening.network is not None
        made: list[NodeProcess] = []
        seen: list[Any] = []

        def join() -> Iterator[None]:
            made.append(joiner(nodes, "d", tmp_path / "d"))
            stack.callback(made[0].close)
            yield from until_ready(made[0])

        def leave() -> Iterator[None]:
            (d,) = made
            network = opening.network
            while network is None or network.agreement.roster.epoch < 1:
                yield
            for _ in range(3):  # tokens of the new roster
                yield
            seen.append((d.get("/status"), d.get("/roster")["fetched"], disk.sizes(tmp_path / "d")))
            yield from until_left(d)
            while network.agreement.roster.epoch < 2:
                yield

        assert reply(opening, (20, join), (100, leave)) == alone
        assert opening.network.figures.failovers == 0
        assert [roster_of(node) for node in nodes] == [(2, ["a", "b"])] * 2
        status, fetched, (_, on_disk) = seen[0]
        assert status["dispatches"] > 0
        assert status["partition"]["bytes"] == planned["d"].gained
        assert abs(fetched - planned["d"].gained) <= 0.02 * planned["d"].gained
        assert planned["a"].gained == planned["b"].gained == 0
        assert sum(node.get("/roster")["fetched"] for node in nodes) == 0
        files = sum(spec.size for spec in store.manifest.files.values())
        most = 1.05 * (files + planned["d"].gained) + (store.path / "manifest.json").stat().st_size
        print(f"d's disk holds {on_disk} bytes, at most {most:.0f}")
        assert on_disk <= most
        # What a and b held before they hold again, from their own disks.
        assert sum(node.get("/status")["partition"]["blocks"] for node in nodes) == 256

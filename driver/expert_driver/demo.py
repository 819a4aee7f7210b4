"""`expert-net demo`: a small model whose experts live in two node processes on this machine."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from expert_driver import tables
from expert_driver.config import Computing, NetworkConfig, Sampling
from expert_driver.nodeprocess import NodeProcess, running
from expert_network.store.manifest import TRUNK, Manifest
from expert_network.units import size

if TYPE_CHECKING:
    from expert_driver.dispatch.network import Network

STORE = Path(__file__).parent / "demo_store"
PROMPT = "Tell me a short story about Mia and the silver whistle."
TERMINATED = 128 + signal.SIGTERM

_NAMES = "abcdefgh"
MOST_NODES = len(_NAMES)


def run(
    prompt: str | None,
    count: int,
    sampling: Sampling,
    computing: Computing,
    environment: Mapping[str, str],
    home: Path,
) -> None:
    """Start `count` nodes, answer `prompt` through them, chat if a person is there, stop them."""
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    with ended_by_sigterm(), _nodes(count, computing, environment) as nodes:
        say(f"Starting {count} nodes on this machine, each with its part of the experts.")
        # While they start: this takes as long as they do.
        from expert_driver import opening, talk

        urls = tuple(node.wait_ready() for node in nodes)
        config = NetworkConfig(urls, False, None, None, home, computing)
        with opening.opened(str(STORE), config, with_text=True) as session:
            if session.network is not None:
                show_split(nodes, urls, session.store.manifest, session.network)
            question = prompt or PROMPT
            say(f"> {question}")
            chat = at_terminal and prompt is None
            talk.talk(session, sampling, question, None, verbose=True, chat=chat)


def _nodes(
    count: int, computing: Computing, environment: Mapping[str, str]
) -> AbstractContextManager[list[NodeProcess]]:
    options = [f"--kernels={computing.kernels}"]
    if computing.threads is not None:
        options.append(f"--threads={computing.threads}")
    return running(_NAMES[:count], STORE, own(environment), options)


def show_split(
    nodes: list[NodeProcess], urls: tuple[str, ...], manifest: Manifest, network: Network
) -> None:
    """Who owns what, and where the driver's own part is."""
    block = manifest.layers[0].block_bytes
    rows = [
        ("driver", "this process", "-", size(manifest.files[TRUNK].size), "trunk, routing, words")
    ]
    for place, (node, url) in enumerate(zip(nodes, urls, strict=True)):
        owned = sum(int((chosen == place).sum()) for chosen in network.agreement.chosen.values())
        part = f"{owned} of {manifest.block_count}"
        rows.append((f"node {node.name}", url, part, size(owned * block), "experts"))
    tables.show(("who", "where", "blocks", "memory", "holds"), rows, sys.stdout)


def own(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what is meant for the nodes and keys of a real network."""
    ours = ("EXPERT_NODE_", "EXPERT_NETWORK_KEY")
    return {name: value for name, value in environment.items() if not name.startswith(ours)}


def say(line: str) -> None:
    print(line, flush=True)


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Within, SIGTERM raises SystemExit, so that what was started is stopped."""

    def on_terminate(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(TERMINATED)

    before = signal.signal(signal.SIGTERM, on_terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

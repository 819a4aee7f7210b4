"""Nodes of the demo's model that can be harmed, and mended on the same port.

with cluster_of("a,b,c", replicas=2) as cluster: cluster.harm("b", "kill") ... cluster.mend("b")
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from tests.driver.programs import DEMO_STORE
from tests.support.nodes import NodeProcess, node_command

#: What can be done to a node: SIGKILL, SIGTERM and SIGSTOP.
HARMS = ("kill", "stop", "pause")


class Cluster:
    """Made by `cluster_of`. Each node has an address that stays, whatever becomes of it."""

    def __init__(self, roster: str, replicas: int) -> None:
        self._roster, self._replicas = roster, replicas
        self._nodes: dict[str, NodeProcess] = {}
        self._ended: set[str] = set()

    def start(self) -> None:
        """Start all nodes side by side."""
        for name in self._roster.split(","):
            self._nodes[name] = self._start(name)
        for node in self._nodes.values():
            node.wait_ready()

    @property
    def ports(self) -> dict[str, int]:
        """Where each node listens on 127.0.0.1."""
        return {name: node.port for name, node in self._nodes.items()}

    @property
    def urls(self) -> tuple[str, ...]:
        """The nodes' addresses."""
        return tuple(node.url for node in self._nodes.values())

    def processes(self) -> Iterator[tuple[str, psutil.Process]]:
        """The processes of the nodes that have not ended."""
        for name, node in self._nodes.items():
            if name not in self._ended:
                yield name, psutil.Process(node.process.pid)

    def harm(self, name: str, how: str) -> None:
        """Do one of HARMS to a node. Does not wait."""
        number = {"kill": signal.SIGKILL, "stop": signal.SIGTERM, "pause": signal.SIGSTOP}[how]
        self._nodes[name].send(number)
        if how != "pause":
            self._ended.add(name)

    def mend(self, name: str) -> None:
        """Have a node serve again, that was harmed or not."""
        node = self._nodes[name]
        if name not in self._ended:
            node.resume()
            return
        node.wait()
        node.close()
        self._nodes[name] = self._start(name, "--port", str(node.port))
        self._nodes[name].wait_ready()
        self._ended.discard(name)

    def close(self) -> None:
        """End all nodes."""
        for node in self._nodes.values():
            node.close()

    def _start(self, name: str, *options: str) -> NodeProcess:
        replicas = ("--replicas", str(self._replicas))
        return NodeProcess(node_command(self._roster, name, DEMO_STORE, *replicas, *options))


@contextmanager
def cluster_of(roster: str, replicas: int) -> Iterator[Cluster]:
    """A node for each name of "a,b,c", all of them ready; ended at the end."""
    cluster = Cluster(roster, replicas)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()

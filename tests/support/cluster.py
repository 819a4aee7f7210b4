"""The nodes of one roster on this machine, each of which may be harmed and mended."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil

from tests.support.nodes import NodeProcess, node_command


class Cluster:
    """A node for each name of a plain roster "a,b,c", on a port that it keeps.

    They end with `stack`.
    """

    def __init__(
        self, stack: ExitStack, roster: str, store: Path, options: Sequence[str] = ()
    ) -> None:
        self._stack, self._roster, self._store, self._options = stack, roster, store, options
        self.names = roster.split(",")
        self._ended = set[str]()
        self._nodes = {name: self._start(name) for name in self.names}
        for node in self._nodes.values():
            node.wait_ready()

    @property
    def urls(self) -> tuple[str, ...]:
        """The nodes' addresses, which stay."""
        return tuple(node.url for node in self._nodes.values())

    def processes(self) -> Iterator[tuple[str, psutil.Process]]:
        """Each node's process now."""
        for name, node in self._nodes.items():
            if name not in self._ended:
                yield name, psutil.Process(node.process.pid)

    def harm(self, name: str, how: str) -> None:
        """Do `how` ("kill", "stop" or "pause") to a node."""
        node = self._nodes[name]
        if how == "stop":
            node.send(signal.SIGTERM)
        else:
            getattr(node, how)()
        if how != "pause":
            self._ended.add(name)

    def mend(self, name: str) -> None:
        """Have a node that was harmed serve again."""
        node = self._nodes[name]
        if name not in self._ended:
            node.resume()
            return
        node.wait()
        self._nodes[name] = self._start(name, "--port", str(node.port)).wait_ready()
        node.close()
        self._ended.discard(name)

    def _start(self, name: str, *options: str) -> NodeProcess:
        command = node_command(self._roster, name, self._store, *self._options, *options)
        node = NodeProcess(command)
        self._stack.callback(node.close)
        return node

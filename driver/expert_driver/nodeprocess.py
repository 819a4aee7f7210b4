"""Node processes of our own, for the demo: started, awaited, and stopped for certain."""

from __future__ import annotations

import re
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import IO

from expert_network.errors import NodeClosed, NodeError, NodeTimeout

START_S = 60.0  # from its start to its ready line; a slow machine imports for ten seconds
STOP_S = 5.0  # from SIGTERM to SIGKILL
TAIL = 2000  # characters of a node's log that are shown when it fails

_READY = re.compile(r"ready on (http://\S+?):? ")


class NodeProcess:
    """One `expert-node` on a free port of this machine.

    It reads our end of a pipe and stops when that closes, so that it cannot outlive us even if we
    are killed. It has a session of its own: Ctrl-C at the terminal is for the driver alone.
    """

    def __init__(
        self,
        name: str,
        roster: str,
        store: Path,
        environment: Mapping[str, str],
        options: Sequence[str] = (),
    ) -> None:
        self.name = name
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 closed in `stop`
        self._process = subprocess.Popen(
            # -P: a module in the current folder must not take the place of one of ours.
            [
                *(sys.executable, "-P", "-m", "expert_node"),
                *("--roster", roster, "--me", name, "--store", str(store)),
                *("--port", "0", "--stop-at-eof", *options),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=dict(environment),
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self, timeout_s: float = START_S) -> str:
        """Its URL, once it has said that it is ready. Raises NodeError with what its log says."""
        line = self._first_line(monotonic() + timeout_s)
        match = _READY.search(line)
        if match is not None:
            return match[1]
        if self._process.poll() is None and not line:
            raise NodeTimeout(self.name, f"was not ready within {timeout_s:g} s", self._said())
        raise NodeClosed(self.name, "ended before it was ready", self._said())

    def stop(self) -> None:
        """Ask it to stop, and make it. Returns when it is gone."""
        self._process.terminate()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            self._log.close()

    def _first_line(self, deadline: float) -> str:
        """The first line of its stdout; what there is of it if it ends or the deadline comes."""
        stdout = self._process.stdout
        assert stdout is not None
        said = b""
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while b"\n" not in said and selector.select(max(0.0, deadline - monotonic())):
                piece = stdout.read1(4096)  # type: ignore[attr-defined]
                if not piece:
                    # The end of stdout comes a moment before the process has ended.
                    self._process.wait(STOP_S)
                    break
                said += piece
        return said.decode(errors="replace")

    def _said(self) -> str:
        self._log.seek(0)
        text = self._log.read().decode(errors="replace").strip()
        return f"it said: {text[-TAIL:]}" if text else "it said nothing"


@contextmanager
def running(
    names: Sequence[str],
    store: Path,
    environment: Mapping[str, str],
    options: Sequence[str] = (),
) -> Iterator[list[NodeProcess]]:
    """Node processes that share `store` under one roster; all are stopped at the end.

    They have just been started: `wait_ready` each. `options` are more words for `expert-node`.
    """
    nodes: list[NodeProcess] = []
    try:
        for name in names:
            nodes.append(NodeProcess(name, ",".join(names), store, environment, options))
        yield nodes
    finally:
        stop_all(nodes)


def stop_all(nodes: Sequence[NodeProcess]) -> None:
    """Stop every node, whatever happens to one of them."""
    errors: list[BaseException] = []
    for node in nodes:
        try:
            node.stop()
        except (OSError, NodeError) as error:
            errors.append(error)
    if errors:
        raise errors[0]

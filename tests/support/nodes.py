"""Real nodes for tests: `python -m expert_node` on a free port of this machine.

    with node_process("a,b", "a", store) as node: ... node.url ...
    with node_processes("a,b", store) as nodes: ... [node.url for node in nodes] ...

A node that does not become ready fails the test with what it wrote on stderr. What leaves the
context is stopped, and killed if it does not stop.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.request import urlopen

#: Seconds; two cores may be shared by several test runs.
READY, STOP = 90.0, 30.0


def python_module() -> list[str]:
    """What `expert-node` is called without being installed."""
    return [sys.executable, "-m", "expert_node"]


def node_command(roster: str, me: str, store: Path | None, *options: str) -> list[str]:
    """The command line of a node on a free port; `options` may say otherwise."""
    command = [*python_module(), "--roster", roster, "--me", me, "--port", "0"]
    return [*command, *(["--store", str(store)] if store else []), *options]


class NodeProcess:
    """A node's process. `url` is there once `wait_ready` has returned."""

    def __init__(self, command: Sequence[str], env: dict[str, str] | None = None) -> None:
        self.url = self.ready_line = ""
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        # EXPERT_NODE_ variables of who runs the tests would be options.
        clean = {k: v for k, v in os.environ.items() if not k.startswith("EXPERT_")}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**clean, **(env or {})},
        )

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self.url.rpartition(":")[2])

    def wait_ready(self, seconds: float = READY) -> NodeProcess:
        """Wait for the ready line."""
        self.ready_line = self.read_line(seconds)
        assert " ready on http://" in self.ready_line, self.story("did not get ready")
        self.url = self.ready_line.split(" ready on ")[1].split(": ")[0]
        return self

    def read_line(self, seconds: float = READY) -> str:
        """The next line on stdout; what there is when it ends or `seconds` pass."""
        assert self.process.stdout is not None
        line, deadline = b"", monotonic() + seconds
        while not line.endswith(b"\n") and (left := deadline - monotonic()) > 0:
            readable, _, _ = select.select([self.process.stdout], [], [], left)
            more = os.read(self.process.stdout.fileno(), 1) if readable else b""
            if not more:
                break
            line += more
        return line.decode().rstrip("\n")

    def get(self, path: str) -> Any:
        """The JSON that it answers to a GET without a key."""
        with urlopen(self.url + path, timeout=10) as answer:
            return json.load(answer)

    def wait(self, seconds: float = STOP) -> int:
        """Wait for its end; the exit code, negative for a signal's number."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.story("did not end")) from None

    def stop(self) -> int:
        """Ask it to stop (SIGTERM) and wait; the exit code."""
        self.send(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """End it as a power cut would, and wait."""
        self.send(signal.SIGKILL)
        self.wait()

    def pause(self) -> None:
        """SIGSTOP: its sockets stay open and it says nothing."""
        self.send(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT: undo `pause`."""
        self.send(signal.SIGCONT)

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.process.poll() is None:
            self.process.send_signal(number)

    def stderr(self) -> str:
        """All that it has written on stderr so far."""
        descriptor = self._stderr.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

    def story(self, what: str) -> str:
        """A failed assertion's text: what happened, and stderr."""
        code = self.process.poll()
        state = "still runs" if code is None else f"ended with {code}"
        return f"the node {what} and {state}; its stderr:\n{self.stderr()}"

    def close(self) -> None:
        """End it in any case and let go of its files."""
        self.resume()
        self.send(signal.SIGTERM)
        try:
            self.process.wait(STOP)
        except subprocess.TimeoutExpired:
            self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._stderr.close()


@contextmanager
def node_process(
    roster: str, me: str, store: Path | None, *options: str, env: dict[str, str] | None = None
) -> Iterator[NodeProcess]:
    """A node that is ready; ended at the end."""
    node = NodeProcess(node_command(roster, me, store, *options), env)
    try:
        yield node.wait_ready()
    finally:
        node.close()


@contextmanager
def node_processes(
    roster: str, store: Path, *options: str, env: dict[str, str] | None = None
) -> Iterator[list[NodeProcess]]:
    """A node for each name of the roster "a,b", started side by side; in the roster's order."""
    names = [item.partition("=")[0].strip() for item in roster.split(",")]
    with ExitStack() as stack:
        nodes = [NodeProcess(node_command(roster, name, store, *options), env) for name in names]
        for node in nodes:
            stack.callback(node.close)
        yield [node.wait_ready() for node in nodes]


def run_node(
    *arguments: str, env: dict[str, str] | None = None, seconds: float = READY
) -> subprocess.CompletedProcess[str]:
    """Run `expert-node` with these arguments to its end."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("EXPERT_")}
    return subprocess.run(
        [*python_module(), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        env={**clean, **(env or {})},
    )

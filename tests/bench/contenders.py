"""Who is measured: each is a program of its own that loads the model, runs, and ends.

`sample` gives tokens per second by what was measured: "decode", "prefill 512" and so on.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import monotonic, sleep
from typing import Any, Protocol

from tests.bench.llama import Llama
from tests.support.nodes import node_processes
from tests.support.servers import unused_port

Sample = dict[str, float]
#: How often everything is measured once a program has started; the median counts.
REPEATS = 3
START_S = 60.0


@dataclass(frozen=True)
class Load:
    """What is asked of everyone: `tokens` decoded after `context`, and prompts read."""

    context: int
    tokens: int
    prompts: tuple[int, ...]
    threads: int


class Contender(Protocol):
    """Something that can be measured under a load."""

    @property
    def name(self) -> str:
        """Who."""

    def sample(self, load: Load) -> Sample:
        """Start, warm up, measure REPEATS times, end; the medians."""


@dataclass(frozen=True)
class Ours:
    """This project: one process, or a driver over `nodes` node processes on this machine.

    All have as many threads: a node with less to do leaves the cores to the others.
    """

    name: str
    store: Path
    nodes: int = 0
    options: tuple[str, ...] = ()

    def sample(self, load: Load) -> Sample:
        words = [
            *("bench", str(self.store), "--json", "--rounds", str(REPEATS), *self.options),
            *("--contexts", str(load.context), "--tokens", str(load.tokens)),
            *("--prompts", ",".join(map(str, load.prompts)), "--threads", str(load.threads)),
            *("--only", "decode", "--only", "prefill"),
        ]
        with self._nodes(load) as urls:
            more = ["--nodes", ",".join(urls)] if urls else []
            command = [sys.executable, "-m", "expert_driver", *words, *more]
            report = json.loads(_output(command))
        found = report["measurements"]
        return {_title(series): series["median"] for series in found if series["unit"] == "tok/s"}

    @contextmanager
    def _nodes(self, load: Load) -> Iterator[list[str]]:
        if not self.nodes:
            yield []
            return
        roster = ",".join("abcdefgh"[: self.nodes])
        with node_processes(roster, self.store, "--threads", str(load.threads)) as nodes:
            yield [node.url for node in nodes]


@dataclass(frozen=True)
class LlamaCpp:
    """llama.cpp's own llama-bench, in one process or over `servers` RPC servers here.

    All have as many threads. The servers have layers of their own, and work one after the other.
    """

    name: str
    llama: Llama
    model: Path
    servers: int = 0

    def sample(self, load: Load) -> Sample:
        with self._servers(load) as addresses:
            remote = ["--rpc", ",".join(addresses)] if addresses else []
            decode = ("-p", "0", "-n", str(load.tokens), "-d", str(load.context))
            prefill = ("-p", ",".join(map(str, load.prompts)), "-n", "0")
            found = self._bench(load, *remote, *decode) + self._bench(load, *remote, *prefill)
        return {
            "decode" if run["n_gen"] else f"prefill {run['n_prompt']}": median(run["samples_ts"])
            for run in found
        }

    def _bench(self, load: Load, *words: str) -> list[dict[str, Any]]:
        fixed = ("-m", str(self.model), "-t", str(load.threads), "-r", str(REPEATS), "-o", "json")
        found: list[dict[str, Any]] = json.loads(
            _output([str(self.llama.bin / "llama-bench"), *fixed, *words])
        )
        return found

    @contextmanager
    def _servers(self, load: Load) -> Iterator[list[str]]:
        program = str(self.llama.bin / "ggml-rpc-server")
        with ExitStack() as stack:
            addresses = []
            for _ in range(self.servers):
                port = unused_port()
                words = [program, "-p", str(port), "-t", str(load.threads)]
                stack.enter_context(_running(words))
                _await_port(port)
                addresses.append(f"127.0.0.1:{port}")
            yield addresses


@dataclass(frozen=True)
class MlxLm:
    """mlx-lm alone on the same weights: the whole load, or 32 tokens read where that is slow."""

    name: str
    shape: str
    whole_load: bool = False

    def sample(self, load: Load) -> Sample:
        more = ["32"]
        if self.whole_load:
            decode = ("--decode", str(load.context), str(load.tokens))
            more = [*map(str, load.prompts), *decode, "--repeats", str(REPEATS)]
        words = [sys.executable, "-m", "tests.bench.mlx_lm_alone", self.shape, *more]
        found: Sample = json.loads(_output(words))
        return found


def _title(series: dict[str, Any]) -> str:
    """Our own names for what llama-bench calls otherwise."""
    if series["what"] == "decode":
        return "decode"
    return f"{series['what']} {series['at'].removesuffix(' tokens')}"


def _output(command: Sequence[str]) -> str:
    """What a command prints on stdout; on a failure its stderr is in the exception's notes."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return done.stdout


@contextmanager
def _running(command: Sequence[str]) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _await_port(port: int) -> None:
    """Wait until something listens there; it says so in no other way."""
    deadline = monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            if monotonic() > deadline:
                raise
            sleep(0.05)

"""What a dispatch costs beside a bare fan-out of the same bytes: `python -m tests.bench.fanout`.

Both sides are real processes on loopback. The bare peers and their driver are what blocking sockets
in Python can do at best: each peer takes so many bytes and answers with so many. Ours are nodes
whose experts compute nothing, asked for the weighted sum of one row. The two take turns in one run,
so that whatever else the machine does meets both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from time import perf_counter
from typing import Any

import mlx.core as mx
import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from expert_driver.dispatch.agreement import Wanted
from expert_driver.dispatch.dispatcher import NetworkExperts
from expert_driver.dispatch.links import Opener
from expert_driver.dispatch.network import Network
from expert_driver.figures import DispatchTimes
from expert_network import kernels
from expert_network.model.host import HostArray
from expert_network.net.opening import prepare
from expert_node.compute import Computer
from expert_node.daemon import _new_event_loop
from expert_node.handover import hand_over
from expert_node.links import Links
from expert_node.metrics import Counters
from expert_protocol.dtypes import WireDType
from expert_protocol.frames import Hello, ReplyMode, Welcome, dispatch_size, reply_size
from expert_protocol.header import HEADER_SIZE, VERSION
from expert_roster.roster import Roster
from tests.support.fixed_blocks import FixedBlocks

DIGEST = "0" * 64
EXPERTS, TOP = 64, 8
LAYER = 0
#: Rounds of one side before it is the other's turn.
TURN = 20

# Bare peers: `python -m tests.bench.fanout peer OUT BACK`


def serve_bare(out: int, back: int) -> None:
    """Take `out` bytes and answer with `back`, for ever, on one connection."""
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    sock, _ = listener.accept()
    prepare(sock)
    room, answer = memoryview(bytearray(out)), bytes(back)
    while _take_exactly(sock, room):
        sock.sendall(answer)


def _take_exactly(sock: socket.socket, room: memoryview) -> bool:
    got, size = 0, len(room)
    while got < size:
        count = sock.recv_into(room[got:])
        if not count:
            return False
        got += count
    return True


@contextmanager
def bare(out: Sequence[int], back: Sequence[int]) -> Iterator[Callable[[], None]]:
    """A function that sends `out` bytes to each peer and takes `back` from each."""
    with ExitStack() as stack:
        rounds = []
        for sent, received in zip(out, back, strict=True):
            port = stack.enter_context(process("peer", sent, received))
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            prepare(sock)
            rounds.append((sock, bytes(sent), memoryview(bytearray(received))))

        def once() -> None:
            for sock, data, _ in rounds:
                sock.sendall(data)
            for sock, _, room in rounds:
                _take_exactly(sock, room)

        yield once


# Our nodes: `python -m tests.bench.fanout node NAME NODES HIDDEN`


class EmptyBlocks(FixedBlocks):
    """Experts that take no time: all of them, in every node, native ones for single rows."""

    compute_dtype = "float32"

    def __init__(self, hidden: int) -> None:
        self._zeros = np.zeros((4096, hidden), np.float32)
        self._experts = kernels.no_experts(hidden)

    def native(self, layer: int) -> object:
        """What a node's native code computes a row with."""
        return self._experts

    def owned(self, layer: int) -> NDArray[np.intp]:
        return np.arange(EXPERTS)

    def compute(
        self, layer: int, mode: ReplyMode, rows: Any, offsets: Any, ids: Any, *rest: Any
    ) -> NDArray[np.float32]:
        return self._zeros[: len(ids) if mode else len(rows)]


def serve_node(name: str, nodes: int, hidden: int) -> None:
    """A node's data plane, on aiohttp and uvloop as in the daemon, around EmptyBlocks."""
    roster, counters = _roster(nodes), Counters()
    welcome = Welcome(
        protocol=VERSION,
        node=name,
        model_digest=DIGEST,
        roster=roster.to_wire(),
        roster_digest=roster.digest,
        epoch=roster.epoch,
        numerics="none",
        compute_dtype="float32",
        dtypes=tuple(WireDType),
    )
    computer = Computer(name, EmptyBlocks(hidden), [(LAYER, EXPERTS)], counters)
    links = Links(welcome, "empty", computer, counters, lambda layer: hidden)
    app = web.Application()
    app.router.add_get("/link", lambda request: hand_over(request, links))
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    with asyncio.Runner(loop_factory=_new_event_loop) as runner:
        runner.run(_serve(app, listener))


async def _serve(app: web.Application, listener: socket.socket) -> None:
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    await asyncio.Event().wait()


def _roster(nodes: int) -> Roster:
    return Roster.parse(",".join(f"n{number}" for number in range(nodes)))


@contextmanager
def empty_network(nodes: int, hidden: int, wire: WireDType = WireDType.BF16) -> Iterator[Network]:
    """Links to `nodes` node processes that compute nothing."""
    hello = Hello(VERSION, DIGEST, None, 0, (wire,), "none", False)
    row = dispatch_size(1, EXPERTS, hidden, WireDType.F32)
    wanted = Wanted(DIGEST, [(LAYER, EXPERTS)], "float32", False, wire, row)
    with ExitStack() as stack:
        ports = [stack.enter_context(process("node", f"n{i}", nodes, hidden)) for i in range(nodes)]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        network = Network(urls, wanted, Opener(None, hello, lambda layer: hidden).open)
        stack.callback(network.close)
        yield network


@contextmanager
def process(*words: object) -> Iterator[int]:
    """This module in a process of its own; the port that it says it listens on."""
    command = [sys.executable, "-m", "tests.bench.fanout", *map(str, words)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        yield int(child.stdout.readline())
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


# The measurement


def measure(
    nodes: int, runs: int = 5, rounds: int = 500, hidden: int = 2048, rows: int = 1
) -> dict[str, Any]:
    """p50 and p99 in microseconds of both, and their ratio, over `runs` interleaved runs.

    "dispatch" is NetworkExperts.weighted_sum as a native trunk calls it in each layer of a token:
    HostArrays in and out, and no observer. "mlx" is the same with MLX arrays; "wire" is the part of
    "dispatch" from the rows to the last reply, observed.
    """
    ids, owners = _ids_over_all(nodes, rows)
    pairs = [int((owners == node).sum()) for node in range(nodes)]
    asked = [int((owners == node).any(axis=1).sum()) for node in range(nodes)]
    header, wire = HEADER_SIZE, WireDType.BF16
    out = [header + dispatch_size(asked[n], pairs[n], hidden, wire) for n in range(nodes)]
    back = [
        header + reply_size(asked[n], pairs[n], hidden, ReplyMode.SUM, wire) for n in range(nodes)
    ]
    with bare(out, back) as plain, empty_network(nodes, hidden, wire) as network:
        seen: list[DispatchTimes] = []
        experts = NetworkExperts(network)
        ways = {"bare": plain} | {
            name: _dispatch(experts, ids, hidden, of)
            for name, of in (("dispatch", HostArray.of), ("mlx", mx.array))
        }
        found: dict[str, list[list[float]]] = {name: [] for name in (*ways, "wire")}
        for run in range(runs + 1):
            taken: dict[str, list[float]] = {name: [] for name in found}
            seen.clear()
            for _ in range(max(1, rounds // TURN)):
                for name, once in ways.items():
                    taken[name] += _timed(once, TURN)
                network.observer = seen.append
                _timed(ways["dispatch"], TURN)
                network.observer = None
            taken["wire"] = [(times.done - times.evaluated) * 1e6 for times in seen]
            for name in found if run else ():  # the first one warms up
                found[name].append(taken[name])
    shape = {"nodes": nodes, "hidden": hidden, "rows": rows, "runs": runs, "rounds": rounds}
    return shape | {"bytes_out": sum(out), "bytes_back": sum(back)} | _summary(found)


def _ids_over_all(nodes: int, rows: int) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Experts of `rows` rows, spread as evenly over all nodes as they can be, and their owners."""
    from expert_roster.rendezvous import owner_table

    first = owner_table(_roster(nodes), [(LAYER, EXPERTS)])[LAYER][:, 0]
    owned = [np.flatnonzero(first == node) for node in range(nodes)]
    rng = np.random.default_rng(1)
    ids = np.array(
        [[rng.choice(owned[(row + pair) % nodes]) for pair in range(TOP)] for row in range(rows)]
    )
    return ids.astype(np.uint32), first[ids].astype(np.int64)


def _dispatch(
    experts: NetworkExperts,
    ids: NDArray[np.uint32],
    hidden: int,
    array: Callable[[Any], mx.array],
) -> Callable[[], None]:
    rng = np.random.default_rng(2)
    x = array(rng.normal(size=(len(ids), hidden)).astype(np.float32))
    weights = array(rng.random(ids.shape).astype(np.float32))
    routed = array(ids)
    mx.eval(x, weights, routed)

    def once() -> None:
        experts.weighted_sum(LAYER, x, routed, weights)

    return once


def _timed(act: Callable[[], None], rounds: int) -> list[float]:
    """Microseconds of each of `rounds` calls."""
    taken = []
    for _ in range(rounds):
        started = perf_counter()
        act()
        taken.append((perf_counter() - started) * 1e6)
    return taken


def _summary(found: dict[str, list[list[float]]]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for name, runs in found.items():
        p50, p99 = ([float(np.percentile(run, part)) for run in runs] for part in (50, 99))
        summary[name] = {
            "p50_us": round(median(p50), 1),
            "p50_us_of_runs": [round(value, 1) for value in p50],
            "p99_us": round(median(p99), 1),
        }
    for name in (name for name in found if name != "bare"):
        ratios = [
            ours / bare
            for ours, bare in zip(
                summary[name]["p50_us_of_runs"], summary["bare"]["p50_us_of_runs"], strict=True
            )
        ]
        summary[name]["ratio"] = round(median(ratios), 3)
        summary[name]["ratio_of_runs"] = [round(ratio, 3) for ratio in ratios]
    return summary


def main() -> None:
    """`peer` and `node` are for `process`."""
    match sys.argv[1:]:
        case ["peer", out, back]:
            serve_bare(int(out), int(back))
            return
        case ["node", name, nodes, hidden]:
            serve_node(name, int(nodes), int(hidden))
            return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=1)
    print(json.dumps(measure(**vars(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()

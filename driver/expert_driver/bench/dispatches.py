"""What a dispatch costs besides computing: the fan-out of one row, timed on its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import mlx.core as mx

from expert_driver.dispatch.dispatcher import NetworkExperts
from expert_driver.dispatch.links import Link
from expert_driver.dispatch.network import Network
from expert_driver.figures import DispatchTimes
from expert_network.store.manifest import Manifest


@contextmanager
def observed(network: Network) -> Iterator[list[DispatchTimes]]:
    """The times of every dispatch of the block, in a list that grows."""
    found: list[DispatchTimes] = []
    before, network.observer = network.observer, found.append
    try:
        yield found
    finally:
        network.observer = before


def single_rows(
    network: Network, manifest: Manifest, precise: bool, count: int, seed: int
) -> list[DispatchTimes]:
    """Send `count` dispatches of one row that ask every node for one expert, layer after layer.

    One expert is the least that a node can be asked for; see `overhead_us` for what is left.
    """
    choose = random.Random(seed)
    experts = NetworkExperts(network, precise)
    mx.random.seed(seed)
    with observed(network) as found:
        for number in range(count):
            layer = manifest.layers[number % len(manifest.layers)]
            ids = mx.array([_one_of_each(network, layer.layer, choose)])
            x, weights = mx.random.normal((1, layer.hidden)), mx.ones(ids.shape)
            mx.eval(x, ids, weights)
            if network.wanted.exact:
                experts.outputs(layer.layer, x, ids)
            else:
                experts.weighted_sum(layer.layer, x, ids, weights)
    return found


def _one_of_each(network: Network, layer: int, choose: random.Random) -> list[int]:
    """An expert of `layer` for each node that has any."""
    owned: dict[int, list[int]] = {}
    for expert, place in enumerate(network.agreement.chosen[layer].tolist()):
        owned.setdefault(place, []).append(expert)
    return [choose.choice(experts) for experts in owned.values()]


def total_us(times: DispatchTimes) -> float:
    """Microseconds from rows that are known to all replies."""
    return (times.done - times.evaluated) * 1e6


def computing_us(times: DispatchTimes) -> int:
    """Microseconds of the slowest node, on its own clock: waiting for its turn, and computing."""
    return max(node.queue_us + node.compute_us for node in times.nodes)


def overhead_us(times: DispatchTimes) -> float:
    """What is left of a dispatch without its slowest node's work."""
    return total_us(times) - computing_us(times)


def ping_us(network: Network, count: int) -> list[float]:
    """Microseconds of `count` PINGs to each node, until its PONG: the wire and the way to it."""
    # What the token loop did natively, the links do not know yet.
    network.exchange.settle()
    return [_ping_us(link) for _ in range(count) for link in network.links]


def _ping_us(link: Link) -> float:
    started = perf_counter()
    link.check(ping=True)
    return (perf_counter() - started) * 1e6

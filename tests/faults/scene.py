"""Real nodes behind a fault proxy, a driver in exact mode over them, and replies that go wrong.

with scene("a,b,c", replicas=2) as it:
    it.generate(200)
    it.at(token=40, layer=5).kill("b")
    it.expect_the_same_tokens()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from time import monotonic, perf_counter

from expert_driver.chaos.faults import (
    Call,
    Corrupt,
    Cut,
    Delay,
    Drip,
    Fault,
    HalfOpen,
    Planned,
    Point,
    Way,
)
from expert_driver.chaos.proxy import FaultProxy
from expert_driver.config import NetworkConfig, Sampling
from expert_driver.opening import Session, opened
from expert_network.errors import ExpertNetworkError
from expert_network.net.address import parse_url
from expert_network.store.reader import Store
from tests.driver.programs import DEMO_STORE
from tests.support.cluster import Cluster

PROMPT = list(range(5, 21))
#: Seconds for all nodes to be linked again after a reply.
BACK_S = 30.0
#: What a reply may take longer for a fault: the longest silence, and as much again for the machine.
DEADLINE_S = 5.0
SLACK_S = 5.0

KINDS = ("kill", "stop", "half-open", "drip", "corrupt", "cut", "delay")


@dataclass(frozen=True)
class Outcome:
    """One reply. slowest: the seconds of its slowest token. error: why it failed."""

    ids: list[int]
    seconds: float
    slowest: float
    error: str | None = None


class Scene:
    """One cluster, and what happens to it."""

    def __init__(self, cluster: Cluster, proxy: FaultProxy, session: Session) -> None:
        self.cluster, self.proxy, self.session = cluster, proxy, session
        self.tokens = 0
        self.last: Outcome | None = None
        self._expected: dict[int, Outcome] = {}
        self.planned: list[Planned] = []
        self._harmed: list[str] = []

    def generate(self, tokens: int) -> Outcome:
        """Say how long replies are; the reply without a fault."""
        self.tokens = tokens
        if tokens not in self._expected:
            self._expected[tokens] = self._reply()
        return self._expected[tokens]

    def at(self, token: int, layer: int) -> Harm:
        """What is to happen when experts of `layer` are asked for `token`."""
        return Harm(self, Point(token, layer))

    def expect_the_same_tokens(self) -> Outcome:
        """Reply, mend all, and see that the faults struck and are not in the reply."""
        expected, before = self._expected[self.tokens], len(self.proxy.fired)
        outcome = self.last = self._reply()
        struck = len(self.proxy.fired) - before
        self.mend()
        assert outcome.error is None, outcome.error
        assert outcome.ids == expected.ids, "other tokens"
        assert struck, "no fault struck"
        allowed = expected.slowest + struck * DEADLINE_S + SLACK_S
        assert outcome.slowest < allowed, f"a token took {outcome.slowest:.1f} s"
        return outcome

    def mend(self) -> None:
        """Have everything as it was before: all nodes serve, and are linked."""
        self.proxy.restart()
        for name in self._harmed:
            self.cluster.mend(name)
        self._harmed.clear()
        self.proxy.heal()
        network, deadline = self.session.network, monotonic() + BACK_S
        assert network is not None
        wait = Event()
        while monotonic() < deadline:
            with suppress(ExpertNetworkError):
                if len(network.ready().nodes) == len(self.cluster.names):
                    return
            wait.wait(0.02)  # nothing tells when a thread has linked to a node
        raise AssertionError("a node was not taken back")

    def harm(self, name: str, how: str) -> None:
        """Kill or pause a node's process, until `mend`."""
        self._harmed.append(name)
        self.cluster.harm(name, how)

    def _reply(self) -> Outcome:
        engine, ids, slowest, error = self.session.engine, [], 0.0, None
        self.proxy.restart()
        self.proxy.plan(*self.planned)
        self.planned.clear()
        began = last = perf_counter()
        sampling = Sampling(max_tokens=self.tokens, ignore_eos=True)
        try:
            for token in engine.generate(PROMPT, engine.context(), sampling):
                now = perf_counter()
                slowest, last = max(slowest, now - last), now
                ids.append(token)
        except ExpertNetworkError as failure:
            error = str(failure)
        return Outcome(ids, perf_counter() - began, slowest, error)


@dataclass(frozen=True)
class Harm:
    """Faults that strike at one point, each at the node that is named."""

    scene: Scene
    point: Point

    def kill(self, node: str) -> None:
        """SIGKILL: its connections are reset."""
        self._plan(Call(lambda: self.scene.harm(node, "kill")), node)

    def stop(self, node: str) -> None:
        """SIGSTOP: its sockets stay open, and it says nothing."""
        self._plan(Call(lambda: self.scene.harm(node, "pause")), node)

    def half_open(self, node: str) -> None:
        """Nothing goes through to it or from it any more, new connections included."""
        self._plan(HalfOpen(), node, lasting=True)

    def drip(self, node: str) -> None:
        """A byte a second comes from it, on new connections too."""
        self._plan(Drip(1.0, Way.TO_DRIVER), node, lasting=True)

    def corrupt(self, node: str, byte: int = 0, bit: int = 0, way: Way = Way.TO_DRIVER) -> None:
        """One bit is flipped, once."""
        self._plan(Corrupt(byte, bit, way), node)

    def cut(self, node: str, reset: bool = True) -> None:
        """Its connection ends, and a new one can be made."""
        self._plan(Cut(reset), node)

    def delay(self, node: str, seconds: float = 0.02) -> None:
        """All that comes from it and goes to it is late, for the rest of the reply."""
        self._plan(Delay(seconds, seconds), node)

    def by_name(self, kind: str, node: str, byte: int, bit: int) -> None:
        """One of KINDS."""
        if kind == "corrupt":
            way = Way.TO_NODE if byte % 2 else Way.TO_DRIVER
            self.corrupt(node, byte, bit, way)
            return
        acts: dict[str, Callable[[str], None]] = {
            "kill": self.kill,
            "stop": self.stop,
            "half-open": self.half_open,
            "drip": self.drip,
            "cut": self.cut,
            "delay": self.delay,
        }
        acts[kind](node)

    def _plan(self, fault: Fault, node: str, lasting: bool = False) -> None:
        self.scene.planned.append(Planned(fault, self.point, node, lasting))


@contextmanager
def scene(roster: str, replicas: int, store: Path = DEMO_STORE) -> Iterator[Scene]:
    """A cluster of the demo's model that is ready, with nothing wrong yet."""
    layers = [layer for layer, _ in Store.open(store).manifest.shape]
    with ExitStack() as stack:
        cluster = Cluster(stack, roster, store, ("--replicas", str(replicas)))
        addresses = dict(zip(cluster.names, map(parse_url, cluster.urls), strict=True))
        proxy = stack.enter_context(FaultProxy(addresses, max(layers)))
        config = NetworkConfig(tuple(proxy.urls().values()), True, None, None, Path("/nowhere"))
        session = stack.enter_context(opened(str(store), config, with_text=False))
        yield Scene(cluster, proxy, session)

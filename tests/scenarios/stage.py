"""A cluster on which scenarios are played, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from time import monotonic, perf_counter

from expert_driver.chaos.faults import Call, Planned
from expert_driver.chaos.proxy import HOST, FaultProxy
from expert_driver.config import NetworkConfig, Sampling
from expert_driver.opening import Session, opened
from expert_network.errors import ExpertNetworkError
from expert_network.store.reader import Store
from tests.driver.programs import DEMO_STORE
from tests.scenarios.transcript import FAULTS, HARMS, Scenario
from tests.support.cluster import Cluster, cluster_of

PROMPT = [11, 7, 300, 42, 5, 99, 120, 8]
#: Seconds for a node that is mended to be taken back.
BACK = 30.0


@dataclass(frozen=True)
class Played:
    """What became of a scenario. `fired`: how many of its steps happened."""

    same: bool
    more_s: float
    fired: int
    error: str | None = None

    def problem(self, scenario: Scenario) -> str | None:
        """What is not as it was expected."""
        if self.error:
            return f"the reply failed: {self.error}"
        if not self.same:
            return "other tokens"
        if self.fired != len(scenario.steps):
            return f"{self.fired} of {len(scenario.steps)} steps happened"
        if self.more_s > scenario.more_s:
            return f"{self.more_s:.1f} s more"
        return None


class Stage:
    """Made by `stage`: nodes, a proxy before each, and a driver."""

    def __init__(self, cluster: Cluster, proxy: FaultProxy, session: Session) -> None:
        self._cluster, self._proxy, self._session = cluster, proxy, session
        self._known: dict[int, tuple[list[int], float]] = {}

    def play(self, scenario: Scenario) -> Played:
        """The reply as the scenario has it; then everything is mended."""
        expected, usual_s = self._without_faults(scenario.tokens)
        before = len(self._proxy.fired)
        self._proxy.restart()
        self._proxy.plan(*self._planned(scenario))
        began, error, tokens = perf_counter(), None, list[int]()
        try:
            tokens = self._reply(scenario.tokens)
        except ExpertNetworkError as failure:
            error = str(failure)
        more_s = perf_counter() - began - usual_s
        fired = len(self._proxy.fired) - before
        self._mend()
        return Played(tokens == expected, more_s, fired, error)

    def _planned(self, scenario: Scenario) -> Iterator[Planned]:
        for step in scenario.steps:
            harm = HARMS.get(step.what)
            if harm is None:
                fault = FAULTS[step.what]
            else:
                fault = Call(partial(self._cluster.harm, step.node, harm))
            yield Planned(fault, step.point, step.node)

    def _without_faults(self, tokens: int) -> tuple[list[int], float]:
        """The reply that everything is measured against, and its seconds."""
        if tokens not in self._known:
            seconds = []
            for _ in range(2):
                began = perf_counter()
                found = self._reply(tokens)
                seconds.append(perf_counter() - began)
            self._known[tokens] = found, min(seconds)
        return self._known[tokens]

    def _reply(self, tokens: int) -> list[int]:
        engine = self._session.engine
        sampling = Sampling(max_tokens=tokens, ignore_eos=True)
        return list(engine.generate(PROMPT, engine.context(), sampling))

    def _mend(self) -> None:
        self._proxy.restart()
        self._proxy.heal()
        for name in self._cluster.ports:
            self._cluster.mend(name)
        network, deadline = self._session.network, monotonic() + BACK
        assert network is not None
        # The driver itself looks for nodes that are away: nothing tells when it has found them.
        while len(network.ready().nodes) < len(self._cluster.ports):
            assert monotonic() < deadline, "a node was not taken back"
            Event().wait(0.05)


@contextmanager
def stage(roster: tuple[str, ...], replicas: int) -> Iterator[Stage]:
    """Three programs' worth of machines for scenarios of this roster, in exact mode."""
    last_layer = Store.open(DEMO_STORE).manifest.layers[-1].layer
    with cluster_of(",".join(roster), replicas) as cluster:
        addresses = {name: (HOST, port) for name, port in cluster.ports.items()}
        with FaultProxy(addresses, last_layer) as proxy:
            urls = tuple(proxy.urls().values())
            config = NetworkConfig(urls, True, None, None, Path("/nowhere"))
            with opened(str(DEMO_STORE), config, with_text=False) as session:
                yield Stage(cluster, proxy, session)

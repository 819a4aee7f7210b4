"""Replies under faults: the same one again and again, and what became of it each time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from random import Random
from time import monotonic, perf_counter, sleep
from typing import Any

from expert_driver import fetching
from expert_driver.chaos.faults import Planned
from expert_driver.chaos.proxy import FaultProxy
from expert_driver.chaos.schedule import draw
from expert_driver.config import NetworkConfig, Sampling
from expert_driver.engine import Engine
from expert_driver.opening import Session, opened
from expert_network.errors import ExpertNetworkError, NetworkMismatch
from expert_network.net.address import parse_url
from expert_network.progress import Progress, silent

PROMPT_TOKENS = 16
#: Seconds for a node to be taken back once nothing is wrong any more, and between two looks.
BACK_S, LOOK_S = 10.0, 0.05
SAME, OTHER, FAILED, UNREACHED = "same tokens", "other tokens", "failed", "not reached"


@dataclass(frozen=True)
class Settings:
    """What is done: `rounds` replies of `tokens` tokens, with a fault of `kinds` in each."""

    kinds: tuple[str, ...]
    rounds: int
    tokens: int
    seed: int


@dataclass(frozen=True)
class Round:
    """What became of one reply. `token` and `layer` count from 0: where the fault struck.

    result: SAME or OTHER tokens as without the fault, FAILED with `error`, or UNREACHED: the reply
    was done before the node was asked at that point or later, and is right. Seconds are those over
    the reply without a fault.
    """

    fault: str
    node: str
    token: int | None
    layer: int | None
    result: str
    added_s: float
    error: str | None = None


@dataclass(frozen=True)
class Report:
    """All rounds, and the seconds of the reply without a fault."""

    settings: Settings
    reply_s: float
    rounds: Sequence[Round]

    @property
    def failures(self) -> int:
        """Rounds whose reply is not what it is without a fault."""
        return sum(one.result in (OTHER, FAILED) for one in self.rounds)

    def as_json(self) -> dict[str, Any]:
        """The same for programs."""
        return asdict(self) | {"failures": self.failures}


def run(
    store: str | None, config: NetworkConfig, settings: Settings, progress: Progress = silent
) -> Report:
    """Put a proxy before each node of `config`, and run the rounds through them.

    Raises what keeps even the reply without faults from being made; NetworkMismatch if that one
    is not the same twice.
    """
    nodes, manifest = fetching.holders(config.nodes, config.key, None)
    layers = [layer for layer, _ in manifest.shape]
    names = {node.url: node.name for node in nodes}
    addresses = {url: parse_url(url) for url in names}
    with FaultProxy(addresses, max(layers), settings.seed) as proxy:
        through = replace(config, nodes=tuple(proxy.urls().values()))
        with opened(store, through, with_text=False) as session:
            return _Rounds(session, proxy, names, layers, settings).run(progress)


class _Rounds:
    def __init__(
        self,
        session: Session,
        proxy: FaultProxy,
        names: dict[str, str],
        layers: Sequence[int],
        settings: Settings,
    ) -> None:
        self._engine: Engine = session.engine
        self._network = session.network
        self._proxy, self._names, self._layers = proxy, names, layers
        self._settings, self._random = settings, Random(settings.seed)
        vocabulary = self._engine.vocabulary
        self._prompt = [self._random.randrange(vocabulary) for _ in range(PROMPT_TOKENS)]

    def run(self, progress: Progress) -> Report:
        settings = self._settings
        first, _ = self._reply()
        expected, reply_s = self._reply()
        if first != expected:
            raise NetworkMismatch(
                "the nodes gave two different replies to one prompt without any fault; check their "
                "blocks with `expert-net verify --nodes`."
            )
        drawn = draw(self._random, settings.kinds, list(self._names), self._layers, settings.tokens)
        rounds = []
        for kind, plan in islice(drawn, settings.rounds):
            rounds.append(self._round(kind, plan, expected, reply_s))
            progress(len(rounds), settings.rounds, "chaos")
        return Report(settings, reply_s, rounds)

    def _round(
        self, kind: str, plan: Sequence[Planned], expected: list[int], reply_s: float
    ) -> Round:
        self._await_all()
        before, error, result = len(self._proxy.fired), None, SAME
        self._proxy.restart()
        self._proxy.plan(*plan)
        began = perf_counter()
        try:
            tokens, _ = self._reply()
            result = SAME if tokens == expected else OTHER
        except ExpertNetworkError as failure:
            result, error = FAILED, str(failure)
        added = perf_counter() - began - reply_s
        self._proxy.heal()
        node = self._names[plan[0].node or ""]
        fired = self._proxy.fired[before:]
        if not fired:
            result = UNREACHED if result == SAME else result
            return Round(kind, node, None, None, result, added, error)
        point = fired[0].point
        return Round(kind, node, point.token, point.layer, result, added, error)

    def _await_all(self) -> None:
        """Wait until every node is linked, so that the next fault finds it."""
        assert self._network is not None
        deadline = monotonic() + BACK_S
        while monotonic() < deadline:
            with suppress(ExpertNetworkError):
                if len(self._network.ready().nodes) == len(self._names):
                    return
            sleep(LOOK_S)

    def _reply(self) -> tuple[list[int], float]:
        """The token ids of a greedy reply, and its seconds."""
        began = perf_counter()
        sampling = Sampling(max_tokens=self._settings.tokens, ignore_eos=True)
        tokens = list(self._engine.generate(self._prompt, self._engine.context(), sampling))
        return tokens, perf_counter() - began

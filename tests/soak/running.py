"""A cluster of the demo's model that answers for a long time while its nodes come and go."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

import psutil

from expert_driver.config import NetworkConfig, Sampling
from expert_driver.engine import Engine
from expert_driver.opening import opened
from expert_network.errors import ExpertNetworkError
from tests.driver.programs import DEMO_STORE
from tests.soak.samples import Series
from tests.support.cluster import Cluster, cluster_of

ROSTER, REPLICAS = "a,b,c", 2
#: Lives from the first reply to the last, so that its memory says something.
STEADY = "a"
TOKENS = 48
#: The share of replies in which something happens to a node.
INCIDENTS = 0.3
#: How many samples a run has at least: one of each this share of it, or each second.
SAMPLES = 60


@dataclass
class Report:
    """What came of a soak."""

    minutes: float
    replies: int = 0
    #: Replies with other tokens than the first, and what those that failed said.
    wrong: int = 0
    failed: list[str] = field(default_factory=list)
    incidents: dict[str, int] = field(default_factory=dict)
    series: dict[str, Series] = field(default_factory=dict)

    @property
    def sound(self) -> bool:
        """Whether every reply was right and nothing grows."""
        return not self.wrong and not self.failed and all(s.flat for s in self.series.values())

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        whole = asdict(self) | {"series": {n: s.as_json() for n, s in self.series.items()}}
        return whole | {"verdict": "flat" if self.sound else "NOT SOUND"}


def run(minutes: float, seed: int) -> Report:
    """Reply for so long, one greedy reply after the other, while nodes die and come back."""
    report, random = Report(minutes), Random(seed)
    with ExitStack() as stack:
        cluster = stack.enter_context(cluster_of(ROSTER, REPLICAS))
        config = NetworkConfig(cluster.urls, True, None, None, Path("/nowhere"))
        session = stack.enter_context(opened(str(DEMO_STORE), config, with_text=False))
        _Soak(cluster, session.engine, report, random).run()
    return report


class _Soak:
    def __init__(self, cluster: Cluster, engine: Engine, report: Report, random: Random) -> None:
        self._cluster, self._engine = cluster, engine
        self._report, self._random = report, random
        self._prompt = [random.randrange(engine.vocabulary) for _ in range(16)]
        self._every = min(1.0, report.minutes * 60 / SAMPLES)
        self._began = self._sampled = monotonic()

    def run(self) -> None:
        expected = list(self._tokens())
        victims = [name for name in ROSTER.split(",") if name != STEADY]
        while monotonic() < self._began + self._report.minutes * 60:
            incident = self._random.random() < INCIDENTS
            victim = self._random.choice(victims)
            self._reply(expected, victim if incident else None)
            if incident:
                self._cluster.mend(victim)

    def _reply(self, expected: list[int], victim: str | None) -> None:
        """One reply, in the middle of which something happens to `victim`."""
        report, at = self._report, self._random.randrange(TOKENS)
        report.replies += 1
        tokens: list[int] = []
        try:
            for token in self._tokens():
                if len(tokens) == at and victim is not None:
                    how = self._random.choice(("kill", "stop", "pause"))
                    report.incidents[how] = report.incidents.get(how, 0) + 1
                    self._cluster.harm(victim, how)
                tokens.append(token)
                self._sample()
            report.wrong += tokens != expected
        except ExpertNetworkError as error:
            report.failed.append(str(error))

    def _tokens(self) -> Iterator[int]:
        sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
        return iter(self._engine.generate(self._prompt, self._engine.context(), sampling))

    def _sample(self) -> None:
        """Look at all processes, if it is time."""
        now = monotonic()
        if now < self._sampled + self._every:
            return
        self._sampled, at = now, (now - self._began) / 60
        series = self._report.series
        series.setdefault("driver", Series()).look(psutil.Process(os.getpid()), at)
        for name, process in self._cluster.processes():
            # One that was started again is another process.
            whose = f"node {name}" if name == STEADY else f"node {name}, {process.pid}"
            series.setdefault(whose, Series()).look(process, at)

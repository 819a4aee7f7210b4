"""One variant that is measured: an open model that reads random tokens and goes on from them."""

from __future__ import annotations

import random
from functools import partial
from time import perf_counter

import mlx.core as mx

from expert_driver.config import NetworkConfig
from expert_driver.context import Context
from expert_driver.opening import Session

_likeliest = partial(mx.argmax, axis=-1)


class Subject:
    """A session under a name, as `config` opened it.

    Ids are random, and the same for every variant of a model.
    """

    def __init__(self, variant: str, session: Session, config: NetworkConfig) -> None:
        self.variant, self.session = variant, session
        self.precise = config.computing.precise(config.exact)
        self._context: Context | None = None

    def prefill(self, length: int, seed: int) -> float:
        """Read `length` tokens into a new context, the next one's logits included; seconds."""
        ids, engine = self._ids(length, seed), self.session.engine
        self._context = context = engine.context()
        started = perf_counter()
        engine.step(context, ids, _likeliest)
        return perf_counter() - started

    def decode(self, tokens: int, seed: int) -> float:
        """Decode `tokens` tokens after what `prefill` has read; seconds.

        Random ids are read, not those that are chosen: random weights may choose one for ever.
        """
        assert self._context is not None
        ids, engine = self._ids(tokens, ~seed), self.session.engine
        started = perf_counter()
        for token in ids:
            engine.step(self._context, [token], _likeliest)
        return perf_counter() - started

    def forget(self) -> None:
        """Let go of the context's memory."""
        self._context = None

    @property
    def traffic(self) -> int:
        """Bytes that have crossed the sockets so far, both ways; 0 in one process."""
        network = self.session.network
        return 0 if network is None else network.traffic

    def _ids(self, count: int, seed: int) -> list[int]:
        choose = random.Random(seed)
        return [choose.randrange(self.session.engine.vocabulary) for _ in range(count)]

"""Experts that are asked and answer later, as those on nodes: in this process, without sockets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from expert_driver.engine import Engine
from expert_driver.passes.passes import Passes
from expert_network.model.seam import Mode, SwitchSite, find_switches, install
from tests.network.family_runs import OneNode


class Far(OneNode):
    """The family's own switch modules; `events` says what was asked and what was taken, by layer.

    `meet` is called before each of these with the events so far. `rows` are those in flight.
    """

    def __init__(self, sites: Sequence[SwitchSite], meet: Callable[[list[str]], None]) -> None:
        super().__init__(sites)
        self.events: list[str] = []
        self.rows: list[int] = []
        self.most_rows = self.most = 0
        self.meet = meet

    def begin_outputs(self, *asked: Any) -> Callable[[], mx.array]:
        return self._begin(self.outputs, *asked)

    def begin_sum(self, *asked: Any) -> Callable[[], mx.array]:
        return self._begin(self.weighted_sum, *asked)

    def abandon(self) -> None:
        self.rows.clear()

    def _begin(
        self, compute: Callable[..., mx.array], layer: int, *asked: mx.array
    ) -> Callable[[], mx.array]:
        self._note(f"ask {layer}")
        mx.eval(*asked)
        self.rows.append(len(asked[0]))
        self.most, self.most_rows = max(self.most, len(self.rows)), max(self.most_rows, *self.rows)

        def finish() -> mx.array:
            self._note(f"take {layer}")
            self.rows.pop(0)
            return mx.array(np.array(compute(layer, *asked)))

        return finish

    def _note(self, event: str) -> None:
        self.events.append(event)
        self.meet(self.events)


def far(
    model: Module, mode: Mode = "sum", meet: Callable[[list[str]], None] = lambda events: None
) -> tuple[Engine, Far]:
    """An engine for `model` whose experts are far, and these."""
    experts, passes = Far(find_switches(model), meet), Passes()
    install(model, passes.attend(experts), mode)
    return Engine(model, frozenset(), passes), experts

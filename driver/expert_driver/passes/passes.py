"""Passes over chunks of a prompt: while one waits for its experts, the next one works.

Two passes run on one thread, as greenlets: MLX's arrays belong to the thread that made them. The
younger one uses no layer's cache before the older one is done with it (order.py): each sees the
tokens in their order, and no bit depends on how the passes are interleaved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import mlx.core as mx
from greenlet import GreenletExit, greenlet

from expert_driver.context import Context
from expert_driver.passes.order import Order, find_order, watched
from expert_driver.stopping import Stop
from expert_network.model.deferred import Experts, Overlapping, overlapping
from expert_network.model.seam import Seam

# Passes at once: one computes here while the other one's experts are computed there. A pass of a
# single token, which a prompt ends with, comes on top: it costs next to nothing where others work.
DEPTH = 2


class Enough(BaseException):
    """Ends a pass whose logits nobody wants, where only these are left to compute."""


class OutOfTurn(Exception):
    """A pass came back to an entry of the cache that the next pass had begun to use."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens for one pass, and whether their logits are wanted."""

    ids: Sequence[int]
    wanted: bool = False


@dataclass(eq=False)
class Pass:
    """One pass: at how many seams it has been, and the entries that it may use.

    `entries` it need not ask for; of those in `given` the next pass has begun to use it is done.
    """

    chunk: Chunk
    reached: int = 0
    done: bool = False
    logits: mx.array | None = None
    entries: set[int] = field(default_factory=set)
    given: set[int] = field(default_factory=set)
    worker: Any = None


class Passes:
    """Runs the passes of one model. Used by one thread.

    `attend` makes the experts that the model's seams are to ask; `learn` is told the model then.
    in_pairs: whether a prompt is to be cut for two passes at once. So it is in exact mode wherever
    the experts are, since the last bits of attention depend on where a chunk begins.
    """

    def __init__(self, stop: Stop | None = None) -> None:
        self.stop = Stop() if stop is None else stop
        self.order: Order | None = None
        self.interleaves = self.in_pairs = False
        self._abandon: Callable[[], None] = lambda: None
        self._settle: Callable[[], None] = lambda: None
        self._overlapping = False
        self._current: Pass | None = None
        self._active: list[Pass] = []

    def attend(self, experts: Experts) -> Experts:
        """`experts`, as the seams of this model are to ask them."""
        if not overlapping(experts):
            return Attended(experts, self)
        self._overlapping = True
        self._abandon = getattr(experts, "abandon", self._abandon)
        self._settle = getattr(experts, "settle", self._settle)
        return AttendedFromAfar(experts, self)

    def learn(self, model: Any) -> None:
        """Take `model`, and find out whether its passes can be interleaved."""
        self._model = model
        self.order = find_order(model)
        self.interleaves = self._overlapping and self.order is not None
        seams = [module for module in model.modules() if isinstance(module, Seam)]
        exact = all(seam.mode == "exact" for seam in seams)
        self.in_pairs = self.order is not None and (self._overlapping or exact)
        self._enough = 0 if self.order is None else self.order.complete_at

    def run(self, context: Context, chunks: Sequence[Chunk]) -> Iterator[mx.array | None]:
        """Read the chunks into the context; after each, its logits (1, ids, vocabulary) if wanted.

        What breaks this off, closing the iterator included, leaves the context with the chunks that
        were given back, or empty.
        """
        if not self.interleaves or len(chunks) == 1:
            for chunk in chunks:
                yield self._alone(context, chunk)
            return
        start, given = list(context.tokens), 0
        try:
            for logits in self._interleaved(context, chunks):
                given += 1
                yield logits
        except OutOfTurn:
            # Never seen in a family of mlx-lm. Then this model is read one pass after the other.
            self.interleaves = False
            # A context that could not go back is empty: then all of it is to be read again.
            read = [*start, *(token for chunk in chunks[:given] for token in chunk.ids)]
            again = cut(read[len(context.tokens) :], max(len(chunk.ids) for chunk in chunks))
            yield from islice(self.run(context, [*again, *chunks[given:]]), len(again), None)

    # --- one pass

    def _alone(self, context: Context, chunk: Chunk) -> mx.array | None:
        self.stop.check()
        self._current = run = Pass(chunk)
        try:
            self._forward(context, run)
            self._finish(context, run)
        except BaseException:
            self._abandon()
            context.recover()
            raise
        finally:
            self._current = None
        return run.logits

    def _forward(self, context: Context, run: Pass) -> None:
        with suppress(Enough):
            run.logits = self._model(mx.array([list(run.chunk.ids)]), cache=context.cache)
        run.done = True

    def _finish(self, context: Context, run: Pass) -> None:
        self._settle()
        context.extend(run.chunk.ids)
        if not run.chunk.wanted:
            run.logits = None
        if len(run.chunk.ids) > 1:
            context.evaluate()
            mx.clear_cache()

    # --- several at once

    def _interleaved(self, context: Context, chunks: Sequence[Chunk]) -> Iterator[mx.array | None]:
        waiting, turns = deque(chunks), deque[Pass]()
        try:
            with watched(context.cache, self._use):
                while waiting or self._active:
                    # A pass that begins comes first: another one's experts are at work.
                    if waiting and len(self._active) < DEPTH + (len(waiting[0].ids) == 1):
                        turns.appendleft(self._begin(context, waiting.popleft()))
                    run = turns.popleft()
                    self._resume(run)
                    if not run.done:
                        turns.append(run)
                    while self._active and self._active[0].done:
                        run = self._active.pop(0)
                        self._finish(context, run)
                        yield run.logits
        except BaseException:
            try:
                self._give_up()
            finally:
                context.recover()
            raise

    def _begin(self, context: Context, chunk: Chunk) -> Pass:
        run = Pass(chunk)
        run.worker = greenlet(partial(self._forward, context, run))
        self._active.append(run)
        return run

    def _resume(self, run: Pass) -> None:
        """Go on with a pass until it would wait, or is done."""
        self._current = run
        try:
            run.worker.switch()
        finally:
            self._current = None

    def _give_up(self) -> None:
        """End the passes that are under way: the younger ones stand on what failed."""
        try:
            while self._active:
                self._active.pop().worker.throw(GreenletExit)
        finally:
            self._active.clear()
            self._abandon()

    def _use(self, entry: int) -> None:
        """The pass at hand is about to use an entry of the cache: wait until that is its turn."""
        run = self._current
        if run is None or entry in run.entries:
            return
        if entry in run.given:
            raise OutOfTurn
        assert self.order is not None
        older = self._active[: self._active.index(run)]
        while any(not o.done and o.reached < self.order.released[entry] for o in older):
            run.worker.parent.switch()
        for before in older:
            before.entries.discard(entry)
            before.given.add(entry)
        run.entries.add(entry)

    # --- what the experts tell

    def arrive(self) -> None:
        """A pass has come to a seam. Raises Cancelled, or Enough if it need not go on."""
        self.stop.check()
        if (run := self._current) is None:
            return
        run.reached += 1
        if run.reached == self._enough and not run.chunk.wanted:
            raise Enough

    def wait(self) -> None:
        """A pass would wait for a reply: let the others work."""
        if (run := self._current) is not None and run.worker is not None:
            run.worker.parent.switch()


def cut(ids: Sequence[int], size: int) -> list[Chunk]:
    """Chunks of at most `size` tokens whose logits nobody wants."""
    return [Chunk(ids[start : start + size]) for start in range(0, len(ids), size)]


class Attended:
    """Experts that tell the passes where they are."""

    def __init__(self, experts: Experts, passes: Passes) -> None:
        self._experts, self._passes = experts, passes

    def outputs(self, layer: int, x: mx.array, ids: mx.array) -> mx.array:
        self._passes.arrive()
        return self._experts.outputs(layer, x, ids)

    def weighted_sum(self, layer: int, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        self._passes.arrive()
        return self._experts.weighted_sum(layer, x, ids, weights)


class AttendedFromAfar:
    """The same with experts that overlap: their replies are waited for when others have worked."""

    def __init__(self, experts: Overlapping, passes: Passes) -> None:
        self._experts, self._passes = experts, passes

    def outputs(self, layer: int, x: mx.array, ids: mx.array) -> mx.array:
        return self.begin_outputs(layer, x, ids)()

    def weighted_sum(self, layer: int, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        return self.begin_sum(layer, x, ids, weights)()

    def begin_outputs(self, layer: int, x: mx.array, ids: mx.array) -> Callable[[], mx.array]:
        self._passes.arrive()
        return partial(self._finish, self._experts.begin_outputs(layer, x, ids))

    def begin_sum(
        self, layer: int, x: mx.array, ids: mx.array, weights: mx.array
    ) -> Callable[[], mx.array]:
        self._passes.arrive()
        return partial(self._finish, self._experts.begin_sum(layer, x, ids, weights))

    def _finish(self, finish: Callable[[], mx.array]) -> mx.array:
        self._passes.wait()
        return finish()

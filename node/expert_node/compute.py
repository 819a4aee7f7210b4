"""One dispatch in, one reply or refusal out: the checks, the turn to compute, and the clock."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from threading import Lock
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from expert_network import kernels
from expert_network.net.rows import decode, encode
from expert_network.store.manifest import LayerSpec
from expert_node.metrics import Counters
from expert_protocol.frames import (
    Dispatch,
    ErrorCode,
    ErrorReply,
    Reply,
    ReplyMode,
    WireDType,
)

log = logging.getLogger("expert_node")

Ids = NDArray[np.integer]


#: Gets blocks of a layer that a dispatch asks to adopt; the sentence of why not, or None.
Take = Callable[[int, Ids], str | None]


class Blocks(Protocol):
    """What computes: the part of a Partition that answers dispatches."""

    @property
    def compute_dtype(self) -> str:
        """The dtype of activations."""

    def owned(self, layer: int) -> Ids:
        """The experts of `layer` that are held, ascending."""

    def hold(self, spec: LayerSpec, blocks: Mapping[int, memoryview]) -> None:
        """Take blocks of one layer, by expert, that are not held yet. One caller at a time."""

    def compute(
        self,
        layer: int,
        mode: ReplyMode,
        rows: NDArray[np.float32],
        offsets: NDArray[np.uint32],
        ids: NDArray[np.uint16],
        weights: NDArray[np.float32],
        precise: bool,
    ) -> NDArray[np.float32]:
        """float32 (R, D) for SUM, (P, D) for EXACT. One caller at a time.

        precise: with activations in the compute dtype, as EXACT always is.
        """


class _Turns:
    """A lock that is given in the order in which it was asked for.

    threading.Lock promises no order: a driver that sends its next dispatch at once could keep all
    others waiting.
    """

    def __init__(self) -> None:
        self._mutex = Lock()
        self._taken = False
        self._waiting: deque[Lock] = deque()

    def acquire(self, blocking: bool = True) -> bool:
        """Whether it was given."""
        with self._mutex:
            if not self._taken:
                self._taken = True
                return True
            if not blocking:
                return False
            turn = Lock()
            turn.acquire()
            self._waiting.append(turn)
        return turn.acquire()

    def release(self) -> None:
        """Give it to who has waited longest."""
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


#: The native ones are for native code as well.
Turns: Any = getattr(kernels._native, "Turns", _Turns) if kernels.available() else _Turns


class Computer:
    """Answers the dispatches of all links from one node's blocks, one at a time.

    node: this node's name. shape: (layer, experts) of every MoE layer. `held` says of each layer,
    in the order of `layers`, which experts are here: bool (layers, 65536), one entry for every id
    that the wire can carry, so that no id needs a check of its own. Whoever asks `blocks` does so
    in `turns`.
    """

    def __init__(self, node: str, blocks: Blocks, shape: list[tuple[int, int]], counters: Counters):
        self.node, self.blocks, self._counters = node, blocks, counters
        self.turns = Turns()
        self._exact = WireDType.for_compute(blocks.compute_dtype)
        self._experts = dict(shape)
        self.layers = {layer: place for place, layer in enumerate(self._experts)}
        self.held = np.zeros((len(self.layers), 1 << 16), np.bool_)
        for layer, place in self.layers.items():
            self.held[place, blocks.owned(layer)] = True
        self._held = {layer: self.held[place] for layer, place in self.layers.items()}
        #: How often the blocks have changed: what was asked of `native` before may be out of date.
        self.version = 0
        #: What native code computes a row of a layer with; None for what the blocks compute.
        self.native: Callable[[int], object] = getattr(blocks, "native", lambda layer: None)

    def answer(self, dispatch: Dispatch, take: Take | None = None) -> Reply | ErrorReply:
        """The reply to `dispatch`, or why there is none. Any thread; waits for its turn.

        take: gets what it asks to adopt.
        """
        try:
            refusal = self._adopt(dispatch, take) or self._refusal(dispatch)
            return self._reply(dispatch) if refusal is None else refusal
        except Exception as error:
            return self.failed(dispatch.layer, error)

    def held_here(self, layer: int, expert: int) -> bool:
        """Whether dispatches for a block are answered. Any thread."""
        return bool(self._held[layer][expert])

    def hold(self, spec: LayerSpec, blocks: Mapping[int, memoryview]) -> None:
        """Hold verified blocks of one layer, by expert, from now on. Any thread."""
        with self.turns:
            new = {
                expert: data
                for expert, data in blocks.items()
                if not self.held_here(spec.layer, expert)
            }
            if new:
                self.blocks.hold(spec, new)
                self.version += 1
                self._held[spec.layer][list(new)] = True

    def change(self, layer: int, experts: Ids, change: Callable[[], None]) -> None:
        """Run `change` between two dispatches; it makes the blocks hold `experts` of `layer`.

        Any thread.
        """
        held, now = self._held[layer], np.zeros(1 << 16, np.bool_)
        now[experts] = True
        with self.turns:
            held &= now  # rows are looked up before their turn: no more of what goes
            change()
            self.version += 1
            held |= now

    def _adopt(self, dispatch: Dispatch, take: Take | None) -> ErrorReply | None:
        """See that what is to be adopted is held."""
        if take is None or not dispatch.adopt:
            return None
        layer, ids = dispatch.layer, np.unique(dispatch.ids)
        missing = ids[~self._held[layer][ids]]
        if not len(missing) or missing[-1] >= self._experts[layer]:
            return None
        problem = take(layer, missing)
        return None if problem is None else ErrorReply(ErrorCode.NO_BLOCK, problem)

    def failed(self, layer: int, error: Exception) -> ErrorReply:
        """The refusal when the blocks have raised."""
        log.exception("layer %d could not be computed", layer)
        what = f"{type(error).__name__}: {error}"
        message = f"node {self.node} failed to compute layer {layer} ({what})"
        return ErrorReply(ErrorCode.INTERNAL, message)

    def cannot_carry(self, layer: int, dtype: WireDType) -> ErrorReply:
        """The refusal when values are not finite once they are encoded."""
        message = (
            f"layer {layer} gives values that {dtype.label} cannot carry; choose a wider --wire"
        )
        return ErrorReply(ErrorCode.BAD_VALUES, message)

    def _refusal(self, dispatch: Dispatch) -> ErrorReply | None:
        held = self._held[dispatch.layer][dispatch.ids]
        if np.count_nonzero(held) != len(held):
            return self._not_owned(dispatch)
        if dispatch.mode is ReplyMode.EXACT and dispatch.dtype is not self._exact:
            message = (
                f"exact replies of node {self.node} travel as {self._exact.label}, the dtype it "
                f"computes in, and {dispatch.dtype.label} was asked for"
            )
            return ErrorReply(ErrorCode.NUMERICS, message)
        return None

    def _not_owned(self, dispatch: Dispatch) -> ErrorReply:
        layer, ids = dispatch.layer, np.unique(dispatch.ids)
        experts = self._experts[layer]
        beyond = ids[ids >= experts]
        if len(beyond):
            message = f"layer {layer} has {experts} experts and no expert {beyond[0]}"
            return ErrorReply(ErrorCode.NOT_OWNED, message)
        missing = ids[~self._held[layer][ids]]
        more = f" and {len(missing) - 1} more of that layer" if len(missing) > 1 else ""
        message = f"node {self.node} does not hold block ({layer}, {missing[0]}){more}"
        return ErrorReply(ErrorCode.NOT_OWNED, message)

    def _reply(self, dispatch: Dispatch) -> Reply | ErrorReply:
        rows, finite = decode(dispatch.rows, dispatch.dtype)
        if not (finite and WireDType.F32.finite(dispatch.weights)):
            message = f"the dispatch for layer {dispatch.layer} has values that are not finite"
            return ErrorReply(ErrorCode.BAD_VALUES, message)
        asked = perf_counter()
        with self.turns:
            began = perf_counter()
            values = self.blocks.compute(
                dispatch.layer,
                dispatch.mode,
                rows,
                dispatch.offsets,
                dispatch.ids,
                dispatch.weights,
                dispatch.precise,
            )
            ended = perf_counter()
        data, finite = encode(values, dispatch.dtype)
        if not finite:
            return self.cannot_carry(dispatch.layer, dispatch.dtype)
        self._counters.computed(len(rows), len(dispatch.ids), began - asked, ended - began)
        queue_us, compute_us = round((began - asked) * 1e6), round((ended - began) * 1e6)
        return Reply(dispatch.mode, dispatch.dtype, queue_us, compute_us, data)

"""expert_node.compute: what is refused, what is answered, and whose turn it is."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Event
from time import sleep
from typing import Any

import numpy as np
import pytest

from expert_node.compute import Computer, Turns
from expert_node.compute import _Turns as PythonTurns
from expert_node.metrics import Counters
from expert_protocol.frames import Dispatch, ErrorCode, ErrorReply, Reply, ReplyMode, WireDType
from tests.support.fixed_blocks import FixedBlocks
from tests.support.wire import KINDS_OF_ROWS

HIDDEN = 4
SHAPE = [(0, 6), (3, 6)]


@dataclass
class FakeBlocks(FixedBlocks):
    """Holds experts 1 and 4 of layer 3; a row's result is the row times `factor`, for each pair."""

    compute_dtype: str = "float32"
    factor: float = 1.0
    error: Exception | None = None
    precise: list[bool] = field(default_factory=list)

    def owned(self, layer: int) -> Any:
        return np.array([1, 4] if layer == 3 else [], np.intp)

    def compute(
        self, layer: int, mode: int, rows: Any, offsets: Any, ids: Any, weights: Any, precise: bool
    ) -> Any:
        if self.error:
            raise self.error
        self.precise.append(precise)
        assert rows.dtype == np.float32
        counts = np.diff(offsets)
        return self.factor * (np.repeat(rows, counts, axis=0) if mode else rows)


def asked(dtype: WireDType = WireDType.F32, **changes: Any) -> Dispatch:
    """Two rows, for the experts 1 and 4, and 4."""
    rows = np.arange(2 * HIDDEN, dtype=np.float32).reshape(2, HIDDEN)
    dispatch = Dispatch(
        layer=3,
        epoch=0,
        mode=ReplyMode.SUM,
        dtype=dtype,
        rows=dtype.encode(rows),
        offsets=np.array([0, 2, 3], np.uint32),
        ids=np.array([1, 4, 4], np.uint16),
        weights=np.ones(3, np.float32),
    )
    return replace(dispatch, **changes)


def computer(**changes: Any) -> Computer:
    return Computer("a", FakeBlocks(**changes), SHAPE, Counters())


def test_precision_is_the_dispatchs() -> None:
    """The blocks are told whether the dispatch asked for precise activations."""
    blocks = FakeBlocks()
    asking = Computer("a", blocks, SHAPE, Counters())
    for precise in (True, False):
        asking.answer(asked(precise=precise))
    assert blocks.precise == [True, False]


def refusal(dispatch: Dispatch, **changes: Any) -> ErrorReply:
    """The refusal that `dispatch` gets."""
    answer = computer(**changes).answer(dispatch)
    assert isinstance(answer, ErrorReply)
    return answer


@pytest.mark.parametrize(("mode", "dtype"), KINDS_OF_ROWS)
def test_answer(mode: ReplyMode, dtype: WireDType) -> None:
    """The reply has the dispatch's mode and dtype, and a row for each row or pair."""
    names = {WireDType.BF16: "bfloat16", WireDType.F16: "float16"}
    reply = computer(compute_dtype=names.get(dtype, "float32")).answer(asked(dtype, mode=mode))
    assert isinstance(reply, Reply)
    count = 2 if mode is ReplyMode.SUM else 3
    assert (reply.mode, reply.dtype) == (mode, dtype)
    assert reply.data.shape == (count, dtype.columns(HIDDEN))
    assert reply.data.dtype == dtype.raw
    expected = dtype.decode(dtype.encode(np.arange(HIDDEN, dtype=np.float32)))
    assert np.array_equal(dtype.decode(reply.data)[0], expected)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([1, 2, 4], "node a does not hold block (3, 2)"),
        ([5, 2, 0], "block (3, 0) and 2 more"),
        ([1, 4, 6], "layer 3 has 6 experts and no expert 6"),
        ([1, 4, 65535], "no expert 65535"),
    ],
)
def test_not_owned(ids: list[int], words: str) -> None:
    """A block that is not held, or does not exist, is refused by its name."""
    answer = refusal(asked(ids=np.array(ids, np.uint16)))
    assert answer.code is ErrorCode.NOT_OWNED
    assert words in answer.message


def test_layer_of_which_nothing_is_held() -> None:
    """A layer with no block here is refused like a block."""
    assert "block (0, 1)" in refusal(asked(layer=0)).message


@pytest.mark.parametrize("dtype", list(WireDType))
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_bad_values(dtype: WireDType, value: float) -> None:
    """A row with a NaN or an infinity is refused, in every dtype."""
    rows = np.ones((2, HIDDEN), np.float32)
    rows[1, 2] = value
    answer = refusal(asked(dtype, rows=dtype.encode(rows)))
    assert answer.code is ErrorCode.BAD_VALUES
    assert "layer 3" in answer.message


@pytest.mark.parametrize("scale", [0xBF80, 0x7B81])
def test_int8_scales_that_may_not_come(scale: int) -> None:
    """A negative scale, or one over 2**120, is refused though its products are finite."""
    rows = WireDType.INT8.encode(np.zeros((2, HIDDEN), np.float32))
    rows[1, -2:] = (scale & 255, scale >> 8)
    assert refusal(asked(WireDType.INT8, rows=rows)).code is ErrorCode.BAD_VALUES


def test_bad_weights() -> None:
    """So is a routing weight."""
    weights = np.array([1, np.nan, 1], np.float32)
    assert refusal(asked(weights=weights)).code is ErrorCode.BAD_VALUES


def test_results_that_the_dtype_cannot_carry() -> None:
    """An overflow of f16 is an error with advice, not an infinity in the reply."""
    answer = refusal(asked(WireDType.F16), factor=1e5)
    assert answer.code is ErrorCode.BAD_VALUES
    assert "f16 cannot carry" in answer.message and "--wire" in answer.message


def test_exact_in_another_dtype() -> None:
    """Exact replies in any dtype but the one that is computed in are refused with both names."""
    answer = refusal(asked(WireDType.BF16, mode=ReplyMode.EXACT))
    assert answer.code is ErrorCode.NUMERICS
    assert "f32" in answer.message and "bf16" in answer.message


def test_a_failing_compute(caplog: pytest.LogCaptureFixture) -> None:
    """An exception in compute is an INTERNAL error to the driver and a traceback in our log."""
    it = computer(error=RuntimeError("no such kernel"))
    answer = it.answer(asked())
    assert isinstance(answer, ErrorReply)
    assert answer.code is ErrorCode.INTERNAL
    assert "no such kernel" in answer.message
    assert "Traceback" in caplog.text
    # ... and the turn is given back.
    assert isinstance(it.answer(asked()), ErrorReply)


def test_counts() -> None:
    """Dispatches, rows, pairs and times are counted; refusals are not."""
    counters = Counters()
    it = Computer("a", FakeBlocks(), SHAPE, counters)
    it.answer(asked())
    it.answer(asked(layer=0))
    assert (counters.dispatches, counters.rows, counters.pairs) == (1, 2, 3)
    assert sum(counters.compute.counts) == sum(counters.queue.counts) == 1


@pytest.mark.parametrize("kind", {Turns, PythonTurns}, ids=lambda kind: kind.__module__)
def test_turns_come_in_order(kind: Any) -> None:
    """Whoever asks first has the next turn, whatever the scheduler thinks."""
    turns = kind()
    order: list[int] = []
    with ThreadPoolExecutor(20) as pool, turns:
        for number in range(20):
            asking = Event()
            pool.submit(take_turn, turns, order, number, asking)
            assert asking.wait(30)
            sleep(0.01)  # it has said so a moment before it asks
    assert order == list(range(20))


def take_turn(turns: Any, order: list[int], number: int, asking: Event) -> None:
    asking.set()
    with turns:
        order.append(number)


@pytest.mark.parametrize("kind", {Turns, PythonTurns}, ids=lambda kind: kind.__module__)
def test_a_turn_ends_with_an_error(kind: Any) -> None:
    """An exception in somebody's turn does not keep it taken; one that is taken is not given."""
    turns = kind()
    with pytest.raises(RuntimeError), turns:
        assert not turns.acquire(False)
        raise RuntimeError
    assert turns.acquire(False)
    turns.release()
    with turns:
        pass


def test_what_is_held_changes_between_two_dispatches() -> None:
    """A change waits for its turn; then what came is answered and what went is refused."""
    asking = computer()
    asking.turns.acquire()
    seen: list[bool] = []
    with ThreadPoolExecutor(1) as pool:
        changed = pool.submit(
            asking.change, 3, np.array([4, 5]), lambda: seen.append(bool(asking.held[1, 1]))
        )
        assert asking.held[1, 1]
        asking.turns.release()
        changed.result(30)
    assert seen == [False]  # no row is let in for a block that is about to go
    assert np.flatnonzero(asking.held[1]).tolist() == [4, 5]
    assert isinstance(asking.answer(asked(ids=np.array([5, 4, 4], np.uint16))), Reply)
    assert isinstance(asking.answer(asked()), ErrorReply)

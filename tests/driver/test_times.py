"""Where the time of a pass goes: the parts add up, whatever the nodes say."""

from __future__ import annotations

import tracemalloc
from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert_driver import times
from expert_driver.figures import DispatchTimes, NodeTimes
from expert_driver.times import Ledger, Parts, Watch, cut

MS = 1e-3


def node(sent: float, replied: float, queue: float = 0, compute: float = 0) -> NodeTimes:
    """All in milliseconds."""
    us = round(queue * 1000), round(compute * 1000)
    return NodeTimes(f"n{sent}", sent * MS, replied * MS, *us, 100, 50)


def dispatch(
    evaluated: float, sent: float, done: float, *nodes: NodeTimes, rows: int = 1, layer: int = 0
) -> DispatchTimes:
    """All in milliseconds."""
    return DispatchTimes(layer, rows, 0.0, evaluated * MS, sent * MS, done * MS, nodes)


def parts(began: float, ended: float, *records: DispatchTimes) -> Parts:
    ledger = Ledger()
    cut(records, began * MS, ended * MS, ledger)
    return ledger.parts


def test_each_part() -> None:
    """Every stretch of a dispatch goes into the part that docs/driver.md says."""
    a = node(11, 20, queue=1, compute=4)  # 9 there and back: 2 wire, 1 queue, 4 compute, 2 wire
    b = node(12, 23, compute=8)
    found = parts(0, 30, dispatch(10, 12, 24, a, b))
    expected = Parts(
        attention=10 + 6,
        packing=2 + 1,
        wire=1 + 2,  # a's first millisecond of wire passed while b was asked
        queue=1,
        compute=4,
        straggler=3,
    )
    assert astuple(found) == pytest.approx([value * MS for value in astuple(expected)])


def test_a_node_that_claims_more_than_there_was() -> None:
    """Queue and compute are never longer than the round trip that they were in."""
    found = parts(0, 10, dispatch(1, 2, 10, node(2, 9, queue=5, compute=50)))
    assert (found.queue, found.compute, found.wire) == pytest.approx((5 * MS, 2 * MS, 0))


def test_two_passes_that_take_turns() -> None:
    """While one waits the other works, and only what is left counts as waiting."""
    first = dispatch(1, 2, 12, node(2, 12, compute=10))
    second = dispatch(8, 9, 20, node(9, 20, compute=11))
    found = parts(0, 20, first, second)
    assert found.attention == pytest.approx((1 + 6) * MS)
    assert found.packing == pytest.approx((1 + 1) * MS)
    assert found.compute == pytest.approx((3 + 8) * MS)


moments = st.floats(0, 1000)
micros = st.integers(0, 2**32 - 1)


@st.composite
def any_dispatch(draw: st.DrawFn) -> DispatchTimes:
    """Times that need not even make sense."""
    nodes = [
        NodeTimes(str(n), draw(moments), draw(moments), draw(micros), draw(micros), 1, 1)
        for n in range(draw(st.integers(1, 3)))
    ]
    evaluated, sent, done = (draw(moments) for _ in range(3))
    return DispatchTimes(0, 1, 0.0, evaluated, sent, done, tuple(nodes))


@given(st.lists(any_dispatch(), max_size=6), moments, moments)
def test_the_parts_add_up(records: list[DispatchTimes], one: float, other: float) -> None:
    """No part is negative; together they are the pass, from any records that lie within it."""
    began, ended = sorted((one, other))
    within = [r for r in records if began <= r.sent <= ended and began <= r.done <= ended]
    ledger = Ledger()
    cut(within, began, ended, ledger)
    assert min(astuple(ledger.parts)) >= 0
    assert ledger.parts.total == pytest.approx(ended - began, abs=1e-9)


def test_a_watch_counts_tokens_from_its_restart() -> None:
    """What the prompt took is not in the tokens' parts, and a token's are all of its time."""
    watch = Watch()
    watch.dispatched(dispatch(1, 2, 9, node(2, 9, compute=5), rows=7))
    watch.chose(7, 0, 10 * MS, 11 * MS)
    watch.restart()
    for start in (20, 40):
        watch.dispatched(dispatch(start + 1, start + 2, start + 9, node(start + 2, start + 9)))
        watch.chose(1, start * MS, (start + 10) * MS, (start + 12) * MS)
    assert watch.tokens == 2
    assert watch.parts.total == pytest.approx(24 * MS)
    assert watch.parts.sampling == pytest.approx(4 * MS)
    assert watch.parts.wire == pytest.approx(14 * MS)


def test_a_watch_forgets_a_pass_that_broke_off() -> None:
    """Dispatches of a pass that came to no token are not in the next one's time."""
    watch = Watch()
    watch.dispatched(dispatch(1, 2, 9, node(2, 9)))
    watch.dispatched(dispatch(21, 22, 29, node(22, 29)))
    watch.chose(1, 20 * MS, 30 * MS, 30 * MS)
    assert watch.parts.total == pytest.approx(10 * MS)


def test_a_watch_keeps_no_more_than_its_limit() -> None:
    """However long a pass is, the dispatches that are kept are bounded."""
    watch = Watch()
    for start in range(3 * times.KEPT):
        watch.dispatched(dispatch(start, start, start + 1, node(start, start + 1)))
        assert len(watch._records) < times.KEPT
    watch.chose(1, 0, 3 * times.KEPT * MS, 3 * times.KEPT * MS)
    assert not watch._records


def test_a_watch_takes_no_more_memory_for_more_tokens() -> None:
    """After 500 tokens it holds what it held after 50."""
    watch, held = Watch(), []
    records = [dispatch(n, n, n + 0.5, node(n, n + 0.5), layer=n) for n in range(16)]
    tracemalloc.start()
    try:
        for count in (50, 500):
            for _ in range(count):
                for record in records:
                    watch.dispatched(record)
                watch.chose(1, 0, 16 * MS, 17 * MS)
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert held[1] <= held[0] + 512
    assert watch.parts.total == pytest.approx(550 * 17 * MS)


def test_lines() -> None:
    """The figures are means for one token, in 80 columns, and their sum stands at the end."""
    watch = Watch()
    assert times.lines(watch, network=True) == []
    watch.dispatched(dispatch(1, 2, 9, node(2, 9, compute=5)))
    watch.chose(1, 0, 10 * MS, 13 * MS)
    names, values = times.lines(watch, network=True)
    assert names.split() == [
        "attention", "packing", "wire", "queue", "compute", "straggler", "sampling", "token",
    ]  # fmt: skip
    assert values.split("  ")[-1].strip() == "13.0 ms" and len(names) == len(values) <= 79
    (line,) = times.lines(watch, network=False)
    assert line == "per token: 10.0 ms in the model, 3.0 ms sampling"

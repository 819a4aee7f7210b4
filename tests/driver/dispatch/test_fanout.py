"""One row sent and gathered natively: the same as through the exchange, whatever happens."""

from __future__ import annotations

import os
import signal
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from threading import Event
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from expert_driver.dispatch import fanout
from expert_driver.dispatch.dispatcher import NetworkExperts
from expert_driver.figures import DispatchTimes
from expert_network.errors import NodeClosed, NodeRefused, NotANode
from expert_network.transfer import Transfer
from expert_protocol.dtypes import WireDType
from expert_protocol.frames import Dispatch, ErrorCode
from tests.driver.dispatch.asking import (
    LAYER,
    OUTPUTS,
    SUM,
    WANTED,
    X,
    experts_of,
    failing,
    nodes_of,
    separate,
    summed,
)
from tests.driver.fakes import FakeLink, FakeNode, answer, computed

#: One row for all experts, so that both nodes have a part in it.
ONE_IDS = np.arange(8, dtype=np.uint32)[None]
ONE_WEIGHTS = np.random.default_rng(8).random((1, 8)).astype(np.float32)
ASKED = LAYER, mx.array(X[:1]), mx.array(ONE_IDS), mx.array(ONE_WEIGHTS)
ONE_SUM = (X[:1, None, :] * (np.arange(8)[:, None] + 1) * ONE_WEIGHTS[..., None]).sum(1)

pytestmark = pytest.mark.skipif(fanout._native is None, reason="the native kernels are not built")


@pytest.fixture
def pair() -> Iterator[list[FakeNode]]:
    with nodes_of("a", "b") as nodes:
        yield nodes


@pytest.fixture
def experts(pair: list[FakeNode]) -> Iterator[NetworkExperts]:
    with experts_of(pair) as experts:
        one(experts)
        yield experts


def one(experts: NetworkExperts) -> Any:
    return np.array(experts.weighted_sum(*ASKED))


def begun(experts: NetworkExperts) -> Any:
    return experts.begin_sum(*ASKED)


def native(experts: NetworkExperts) -> bool:
    """Whether the last dispatch has gone and come natively."""
    return experts._fanout is not None and experts._fanout._ahead


def check(experts: NetworkExperts) -> None:
    """One row gives the right sum, natively."""
    np.testing.assert_allclose(one(experts), ONE_SUM, rtol=1e-5)
    assert native(experts)


@pytest.mark.parametrize("wire", list(WireDType))
def test_the_bits_of_the_exchange(
    wire: WireDType, pair: list[FakeNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frames that nodes get, and the sums, are those that the exchange would send and give."""
    made = {}
    for way in ("native", "exchange"):
        if way == "exchange":
            monkeypatch.setattr(fanout.Fanout, "begin", lambda *arguments: None)
        for node in pair:
            node.dispatches.clear()
        with experts_of(pair, replace(WANTED, wire=wire)) as experts:
            sums = [one(experts).tobytes() for _ in range(3)]
            assert native(experts) is (way == "native")
        asked = [
            [(d.layer, d.epoch, d.mode, d.dtype, d.precise) for d in node.dispatches]
            + [
                array.tobytes()
                for d in node.dispatches
                for array in (d.rows, d.offsets, d.ids, d.weights)
            ]
            for node in pair
        ]
        made[way] = sums, asked
    assert made["native"] == made["exchange"]


def test_it_takes_turns_with_the_exchange(experts: NetworkExperts) -> None:
    """Long dispatches and single outputs may come between; sequence numbers go on."""
    for _ in range(3):
        check(experts)
        np.testing.assert_allclose(summed(experts), SUM, rtol=1e-5)
        check(experts)
        assert np.array_equal(separate(experts), OUTPUTS)


def test_what_is_begun_meanwhile(experts: NetworkExperts) -> None:
    """A row that is under way is handed over when more is asked, and its sum is still right."""
    check(experts)
    first, second = begun(experts), begun(experts)
    np.testing.assert_allclose(summed(experts), SUM, rtol=1e-5)
    for finish in (second, first):
        np.testing.assert_allclose(np.array(finish()), ONE_SUM, rtol=1e-5)
    check(experts)


def reply_bytes(link: FakeLink, dispatch: Dispatch) -> bytes:
    return b"".join(link.connection.reply(computed(dispatch)))


def dripped(link: FakeLink, dispatch: Dispatch) -> None:
    whole = reply_bytes(link, dispatch)
    for at in range(0, len(whole), 7):
        link.sock.sendall(whole[at : at + 7])


def working_first(link: FakeLink, dispatch: Dispatch) -> None:
    link.stream.send(link.connection.working())
    answer(link, dispatch)


def late(link: FakeLink, dispatch: Dispatch) -> None:
    Event().wait(2 * fanout.WAIT_S)
    answer(link, dispatch)


@pytest.mark.parametrize("behave", [dripped, working_first, late])
def test_what_is_slow_or_busy_is_waited_for(
    pair: list[FakeNode], experts: NetworkExperts, behave: Any
) -> None:
    """A reply in pieces, behind a WORKING, or long after, is the same reply."""
    check(experts)
    failing(pair[1], behave)
    np.testing.assert_allclose(one(experts), ONE_SUM, rtol=1e-5)
    check(experts)
    assert len(pair[1].links) == 1


def cut_short(link: FakeLink, dispatch: Dispatch) -> None:
    link.sock.sendall(reply_bytes(link, dispatch)[:40])
    link.sock.close()


def damaged(link: FakeLink, dispatch: Dispatch) -> None:
    whole = bytearray(reply_bytes(link, dispatch))
    whole[-1] ^= 1
    link.sock.sendall(whole)


def refuse(link: FakeLink, dispatch: Dispatch) -> None:
    link.stream.send(link.connection.error(ErrorCode.BAD_VALUES, "no"))


def not_finite(link: FakeLink, dispatch: Dispatch) -> None:
    reply = computed(dispatch)
    data = np.full(reply.data.shape, np.nan, np.float32)
    link.stream.send(link.connection.reply(replace(reply, data=data)))


@pytest.mark.parametrize(
    ("behave", "error", "links"),
    [
        (lambda link, dispatch: link.sock.close(), NodeClosed, 2),
        (lambda link, dispatch: link.reset(), NodeClosed, 2),
        (lambda link, dispatch: link.sock.sendall(b"x" * 32), NotANode, 2),
        (cut_short, NodeClosed, 2),
        (damaged, NotANode, 2),
        (not_finite, NodeRefused, 2),
        (refuse, NodeRefused, 1),
    ],
)
def test_faults_are_those_of_the_exchange(
    pair: list[FakeNode], experts: NetworkExperts, behave: Any, error: type[Exception], links: int
) -> None:
    """Each fault is its error at once, and a link goes on or is opened again as ever."""
    check(experts)
    failing(pair[1], behave)
    with pytest.raises(error):
        one(experts)
    one(experts)
    check(experts)
    assert [len(node.links) for node in pair] == [1, links]


def test_an_interrupt_closes_what_is_outstanding(
    pair: list[FakeNode], experts: NetworkExperts
) -> None:
    """A KeyboardInterrupt while a reply is owed leaves no link on which it could come later."""
    check(experts)
    released = Event()

    def interrupting(link: FakeLink, dispatch: Dispatch) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        released.wait(20)

    failing(pair[1], interrupting)
    with pytest.raises(KeyboardInterrupt):
        one(experts)
    released.set()
    one(experts)
    check(experts)
    assert len(pair[1].links) == 2


def test_what_is_abandoned_is_owed_no_more(pair: list[FakeNode], experts: NetworkExperts) -> None:
    """The links of a row that is given up are closed, and opened again for the next one."""
    check(experts)
    for node in pair:
        failing(node, lambda link, dispatch: None)
    begun(experts)
    experts.abandon()
    one(experts)
    check(experts)
    assert [len(node.links) for node in pair] == [2, 2]


def test_figures_and_times(pair: list[FakeNode], experts: NetworkExperts) -> None:
    """What the nodes did is counted as ever, and the observer sees it."""
    network = experts._network
    network.figures.reset()
    seen: list[DispatchTimes] = []
    network.observer = seen.append
    before = network.traffic
    for _ in range(3):
        check(experts)
    figures = network.figures
    assert (figures.dispatches, figures.singles) == (3, 3)
    assert sum(node.pairs for node in figures.nodes) == 24
    assert all(node.rows == node.dispatches == 3 for node in figures.nodes)
    assert all(node.compute_us == 150 and node.queue_us == 9 for node in figures.nodes)
    moved = sum(node.sent + node.received for node in figures.nodes)
    assert moved == figures.single_bytes == network.traffic - before
    for times in seen:
        assert times.entered <= times.evaluated <= times.sent <= times.done
        for node in times.nodes:
            assert times.evaluated <= node.sent <= node.replied <= times.done
            assert (node.queue_us, node.compute_us) == (3, 50)


def test_strided_rows(experts: NetworkExperts) -> None:
    """A row whose values do not lie one after the other is sent as what it is."""
    check(experts)
    x = mx.array(np.repeat(X[:1], 2, axis=1))[:, ::2]
    made = experts.weighted_sum(LAYER, x, mx.array(ONE_IDS), mx.array(ONE_WEIGHTS))
    np.testing.assert_allclose(np.array(made), ONE_SUM, rtol=1e-5)


def test_nothing_is_left_behind(pair: list[FakeNode], experts: NetworkExperts) -> None:
    """What dispatches have allocated is as much after many tokens as after a few."""
    ours = [tracemalloc.Filter(True, "*/expert_driver/dispatch/*")]
    sizes = []
    tracemalloc.start()
    try:
        for _ in range(4):
            for _ in range(50):
                one(experts)
            for node in pair:
                node.dispatches.clear()
            experts._network.figures.reset()
            traces = tracemalloc.take_snapshot().filter_traces(ours).traces
            sizes.append(sum(trace.size for trace in traces))
    finally:
        tracemalloc.stop()
    assert abs(sizes[-1] - sizes[1]) < 4096


class Promising(Transfer):
    """Promises what stands in MLX's memory when it is read, as on a CPU one can."""

    promises = True

    def promise(self, shape: tuple[int, ...]) -> tuple[mx.array, Any]:
        made = mx.zeros(shape)
        mx.eval(made)
        return made + 0, np.asarray(made)


@pytest.fixture
def promising(experts: NetworkExperts) -> NetworkExperts:
    return NetworkExperts(experts._network, transfer=Promising())


def test_sums_are_promised(promising: NetworkExperts) -> None:
    """One row's sum is given out before it comes, and is there once the next one was asked for."""
    sums = []
    for _ in range(3):
        sums.append(begun(promising)() * 1)
        assert promising._promise is not None
    promising.settle()
    assert promising._promise is None
    for found in sums:
        np.testing.assert_allclose(np.array(found), ONE_SUM, rtol=1e-5)
    np.testing.assert_allclose(one(promising), ONE_SUM, rtol=1e-5)
    assert promising._network.counters.singles >= 4


def test_promises_are_broken(pair: list[FakeNode], promising: NetworkExperts) -> None:
    """What a promised sum's dispatch raises comes when it is waited for; the next one is right."""
    begun(promising)()
    promising.settle()
    failing(pair[0], lambda link, dispatch: link.reset())
    begun(promising)()
    with pytest.raises(NodeClosed):
        begun(promising)
    np.testing.assert_allclose(one(promising), ONE_SUM, rtol=1e-5)
    begun(promising)()
    promising.abandon()
    assert promising._promise is None
    np.testing.assert_allclose(one(promising), ONE_SUM, rtol=1e-5)

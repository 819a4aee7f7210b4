"""Dispatches over real sockets: what is asked, what comes back, and what each fault becomes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from threading import Event
from time import monotonic
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from expert_driver.dispatch import exchange, gathering, network
from expert_driver.dispatch.agreement import Wanted
from expert_driver.dispatch.dispatcher import Finish, NetworkExperts
from expert_driver.dispatch.gathering import Gathering, Job
from expert_driver.dispatch.links import Link, Opener, link_refusal, refusal
from expert_driver.dispatch.network import open_all
from expert_driver.dispatch.routing import split
from expert_driver.figures import DispatchTimes
from expert_network.errors import (
    NetworkMismatch,
    NodeClosed,
    NodeRefused,
    NodeTimeout,
    NotANode,
)
from expert_network.net import stream
from expert_network.net.stream import SEND_TIMEOUT, FrameStream
from expert_protocol.dtypes import WireDType
from expert_protocol.frames import Dispatch, ErrorCode, ErrorReply, ReplyMode, reply_size
from expert_roster.roster import Roster
from tests.driver.dispatch.asking import (
    HELLO,
    IDS,
    LAYER,
    OUTPUTS,
    SHAPE,
    SUM,
    WANTED,
    WEIGHTS,
    X,
    experts_of,
    failing,
    nodes_of,
    separate,
    summed,
)
from tests.driver.fakes import DIGEST, HIDDEN, FakeLink, FakeNode, answer, computed


@pytest.fixture
def pair() -> Iterator[list[FakeNode]]:
    with nodes_of("a", "b") as nodes:
        yield nodes


@pytest.fixture
def experts(pair: list[FakeNode]) -> Iterator[NetworkExperts]:
    with experts_of(pair) as experts:
        yield experts


# What is right


@pytest.mark.parametrize("rows", [1, 2, 6])
def test_sums_and_outputs(experts: NetworkExperts, rows: int) -> None:
    """Sums are the weighted sums and outputs stand in routing order, whoever made them."""
    np.testing.assert_allclose(summed(experts, rows), SUM[:rows], rtol=1e-5)
    assert np.array_equal(separate(experts, rows), OUTPUTS[:rows])


def test_a_node_gets_only_its_own_rows(pair: list[FakeNode], experts: NetworkExperts) -> None:
    """Each pair goes to its owner alone, with its row's values and its weight."""
    summed(experts)
    asked = 0
    agreement = experts._network.agreement
    for node in pair:
        place = [greeting.name for greeting in agreement.nodes].index(node.welcome.node)
        for dispatch in node.dispatches:
            assert (agreement.chosen[LAYER][dispatch.ids] == place).all()
            asked += len(dispatch.ids)
            rows = [np.flatnonzero((row == X).all(1))[0] for row in dispatch.rows]
            assert rows == sorted(rows)
    assert asked == IDS.size


def test_the_order_of_nodes_is_not_in_the_bits() -> None:
    """Every order of --nodes gives the same bits in sum mode."""
    found = set()
    with nodes_of("a", "b", "c") as nodes:
        for order in permutations(nodes):
            with experts_of(list(order)) as experts:
                found.add(summed(experts).tobytes())
    assert len(found) == 1


@pytest.mark.parametrize("wire", [WireDType.BF16, WireDType.F16, WireDType.INT8])
def test_rounded_on_the_wire(pair: list[FakeNode], wire: WireDType) -> None:
    """Rows and sums can travel in less than f32; the result is float32."""
    with experts_of(pair, replace(WANTED, wire=wire)) as experts:
        np.testing.assert_allclose(summed(experts), SUM, rtol=0.03, atol=0.03)
    assert {dispatch.dtype for node in pair for dispatch in node.dispatches} == {wire}


def test_single_outputs_travel_as_each_node_computes(pair: list[FakeNode]) -> None:
    """A family that cannot be summed gets single outputs, in each node's own compute dtype."""
    pair[1].welcome = replace(pair[1].welcome, compute_dtype="bfloat16")
    with experts_of(pair, replace(WANTED, wire=WireDType.F16)) as experts:
        outputs = experts.outputs(LAYER, mx.array(X).astype(mx.bfloat16), mx.array(IDS))
    assert outputs.dtype == mx.bfloat16
    np.testing.assert_allclose(np.array(outputs.astype(mx.float32)), OUTPUTS, rtol=0.03, atol=0.03)
    asked = [{dispatch.dtype for dispatch in node.dispatches} for node in pair]
    assert asked == [{WireDType.F32}, {WireDType.BF16}]


def test_bfloat16_travels_bit_for_bit(pair: list[FakeNode]) -> None:
    """In exact mode bfloat16 rows arrive as they are."""
    wanted = Wanted(DIGEST, SHAPE, "bfloat16", True, WireDType.BF16, 72)
    for node in pair:
        node.welcome = replace(node.welcome, compute_dtype="bfloat16")
    x = mx.array(X).astype(mx.bfloat16)
    with experts_of(pair, wanted) as experts:
        experts.outputs(LAYER, x, mx.array(IDS))
    sent = {row.tobytes() for node in pair for d in node.dispatches for row in d.rows}
    assert sent == {row.tobytes() for row in np.array(x.view(mx.uint16))}


@pytest.mark.parametrize("limits", [{"max_rows": 2}, {"max_payload": 150}])
def test_large_dispatches_are_split(limits: dict[str, int]) -> None:
    """What is more than a node takes goes in several dispatches, with the same result."""
    with nodes_of("a", "b", **limits) as nodes, experts_of(nodes) as experts:
        np.testing.assert_allclose(summed(experts), SUM, rtol=1e-5)
        assert np.array_equal(separate(experts), OUTPUTS)
        assert max(len(node.dispatches) for node in nodes) > 2


def test_the_bits_do_not_depend_on_the_parts(
    pair: list[FakeNode], experts: NetworkExperts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dispatches are cut so that no reply is long, with the same bits in the same order."""
    whole = summed(experts), separate(experts)
    before = sum(len(node.dispatches) for node in pair)
    monkeypatch.setattr(gathering, "PART_BYTES", 110)
    assert np.array_equal(summed(experts), whole[0])
    assert np.array_equal(separate(experts), whole[1])
    later = [dispatch for node in pair for dispatch in node.dispatches][before:]
    assert len(later) > 4
    assert max(computed(dispatch).data.nbytes for dispatch in later) <= 110


@pytest.mark.parametrize("mode", ReplyMode)
def test_no_reply_is_over_eight_mebibytes(mode: ReplyMode) -> None:
    """A long prompt in a large model is asked for in parts whose replies are 8 MiB at most."""
    hidden, k, count = 2048, 8, 1200
    owners = np.random.default_rng(7).integers(0, 2, (count, k))
    rows = {WireDType.F32: np.zeros((count, hidden), np.float32)}
    weights = np.ones((count, k), np.float32)
    call = gathering.Call(LAYER, 0, mode, rows, k)
    with nodes_of("a") as nodes:
        link = Opener(None, HELLO, lambda layer: hidden).open(nodes[0].url)
        share = split(owners, 2, owners, weights)[0]
        assert share is not None
        made = gathering.parts(share, link, call, WireDType.F32)
        link.close()
    assert np.array_equal(np.concatenate([part.rows for part in made]), share.rows)
    assert np.array_equal(np.concatenate([part.pairs for part in made]), share.pairs)
    for part in made:
        size = reply_size(len(part.rows), len(part.pairs), hidden, mode, WireDType.F32)
        assert size <= 8 << 20
    assert len(made) > 1


def test_rows_of_any_layout(experts: NetworkExperts) -> None:
    """Rows that are a transposed view of something are sent as what they are."""
    x = mx.array(np.ascontiguousarray(X.T)).T
    assert np.array_equal(np.array(experts.outputs(LAYER, x, mx.array(IDS))), OUTPUTS)


def test_figures_are_counted(experts: NetworkExperts) -> None:
    """Pairs, rows, bytes and times are counted for each node, single rows apart."""
    summed(experts)
    summed(experts, rows=1)
    figures = experts._network.figures
    assert sum(node.pairs for node in figures.nodes) == IDS.size + 3
    assert all(node.compute_us == 50 * node.dispatches for node in figures.nodes)
    assert (figures.dispatches, figures.singles) == (2, 1)
    sent = sum(node.sent for node in figures.nodes)
    received = sum(node.received for node in figures.nodes)
    assert 0 < figures.single_bytes < sent + received


def begun(experts: NetworkExperts, rows: int) -> Finish:
    x, ids, weights = mx.array(X[:rows]), mx.array(IDS[:rows]), mx.array(WEIGHTS[:rows])
    return experts.begin_sum(LAYER, x, ids, weights)


def test_dispatches_that_overlap(experts: NetworkExperts) -> None:
    """Two dispatches may be begun before either is waited for, in any order."""
    for first, second in ((1, 6), (6, 1)):
        waiting = {rows: begun(experts, rows) for rows in (first, second)}
        outputs = experts.begin_outputs(LAYER, mx.array(X), mx.array(IDS))
        for rows in (6, 1):
            np.testing.assert_allclose(np.array(waiting[rows]()), SUM[:rows], rtol=1e-5)
        assert np.array_equal(np.array(outputs()), OUTPUTS)


def test_a_link_that_ends_fails_all_that_is_owed_on_it(
    pair: list[FakeNode], experts: NetworkExperts
) -> None:
    """Each dispatch that was under way raises when it is waited for; the next one succeeds."""
    released = Event()

    def end(link: FakeLink, dispatch: Dispatch) -> None:
        released.wait(20)
        link.sock.close()

    failing(pair[1], end)
    waiting = [begun(experts, 6), begun(experts, 6)]
    released.set()
    for finish in waiting:
        with pytest.raises(NodeClosed):
            finish()
    np.testing.assert_allclose(summed(experts), SUM, rtol=1e-5)


def test_a_refusal_fails_one_dispatch_alone(pair: list[FakeNode], experts: NetworkExperts) -> None:
    """What was asked on the link after the refused dispatch is answered."""

    def refuse(link: FakeLink, dispatch: Dispatch) -> None:
        link.stream.send(link.connection.error(ErrorCode.BAD_VALUES, "no"))

    failing(pair[1], refuse)
    first, second = begun(experts, 6), begun(experts, 6)
    np.testing.assert_allclose(np.array(second()), SUM, rtol=1e-5)
    with pytest.raises(NodeRefused):
        first()
    assert len(pair[1].links) == 1


def test_what_is_abandoned_is_owed_no_more(pair: list[FakeNode], experts: NetworkExperts) -> None:
    """The links on which replies are owed are closed, and opened again for the next dispatch."""
    for node in pair:
        failing(node, lambda link, dispatch: None)
    begun(experts, 6)
    experts.abandon()
    np.testing.assert_allclose(summed(experts), SUM, rtol=1e-5)
    assert [len(node.links) for node in pair] == [2, 2]


def test_an_observer_sees_when_and_how_much(pair: list[FakeNode], experts: NetworkExperts) -> None:
    """The observer is told each dispatch's times in their order, and its nodes' figures."""
    seen: list[DispatchTimes] = []
    experts._network.observer = seen.append
    summed(experts)
    (times,) = seen
    assert (times.layer, times.rows) == (LAYER, 6)
    assert times.entered <= times.evaluated <= times.sent <= times.done
    assert [node.name for node in times.nodes] == ["a", "b"]
    for node, figures in zip(times.nodes, experts._network.figures.nodes, strict=True):
        assert times.evaluated <= node.sent <= node.replied <= times.done
        assert (node.queue_us, node.compute_us) == (3, 50)
        assert (node.out_bytes, node.in_bytes) == (figures.sent, figures.received)


# What is wrong


def cut_short(link: FakeLink, dispatch: Dispatch) -> None:
    buffers = link.connection.reply(computed(dispatch))
    link.sock.sendall(b"".join(buffers)[:40])
    link.sock.close()


def say_goodbye(link: FakeLink, dispatch: Dispatch) -> None:
    link.stream.send(link.connection.goodbye("draining"))


@pytest.mark.parametrize(
    "behave",
    [
        pytest.param(lambda link, dispatch: link.sock.close(), id="closed"),
        pytest.param(lambda link, dispatch: link.reset(), id="reset"),
        pytest.param(cut_short, id="closed in the middle of a reply"),
        pytest.param(
            lambda link, dispatch: link.stream.send(link.connection.goodbye("draining")),
            id="goodbye",
        ),
    ],
)
def test_a_link_that_ends_is_an_error_at_once(
    pair: list[FakeNode], experts: NetworkExperts, behave: Any
) -> None:
    """A link that ends while a reply is owed is NodeClosed within a second, and is opened again."""
    failing(pair[1], behave)
    started = monotonic()
    with pytest.raises(NodeClosed) as caught:
        summed(experts)
    assert monotonic() - started < 1.0
    assert caught.value.node == "b"
    np.testing.assert_allclose(summed(experts), SUM, rtol=1e-5)
    assert len(pair[0].links) == 1 and len(pair[1].links) == 2


def test_others_are_gathered_when_one_fails(pair: list[FakeNode], experts: NetworkExperts) -> None:
    """The link of a node that has replied stays open when another fails."""
    failing(pair[0], lambda link, dispatch: link.sock.close())
    with pytest.raises(NodeClosed):
        summed(experts)
    summed(experts)
    assert len(pair[1].links) == 1


def test_silence_is_a_timeout(
    pair: list[FakeNode], experts: NetworkExperts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that sends nothing is NodeTimeout after the silence that is allowed."""
    monkeypatch.setattr(exchange, "SILENCE_S", 0.3)
    released = Event()
    failing(pair[1], lambda link, dispatch: released.wait(20))
    with pytest.raises(NodeTimeout) as caught:
        summed(experts)
    assert caught.value.node == "b"
    released.set()
    np.testing.assert_allclose(summed(experts), SUM, rtol=1e-5)


def test_the_silence_that_is_allowed() -> None:
    """Silence means death after five seconds, and the notices say so."""
    assert exchange.SILENCE_S == 5.0


def test_no_reply_waits_for_another(
    pair: list[FakeNode], experts: NetworkExperts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one node's frame has only begun to come, another's reply is taken."""
    taken = Event()
    take = Gathering.take

    def noted(gathering: Gathering, job: Job, *answer: Any) -> None:
        take(gathering, job, *answer)
        if job.link.name == "b":
            taken.set()

    def slowly(link: FakeLink, dispatch: Dispatch) -> None:
        whole = b"".join(link.connection.reply(computed(dispatch)))
        link.sock.sendall(whole[:16])
        taken.wait(20)
        link.sock.sendall(whole[16:])

    failing(pair[0], slowly)
    monkeypatch.setattr(Gathering, "take", noted)
    np.testing.assert_allclose(summed(experts), SUM, rtol=1e-5)
    assert taken.is_set()


def test_what_came_in_time_is_not_late(
    pair: list[FakeNode], experts: NetworkExperts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reply that came while the driver was busy for long is taken, however many reads it is."""
    rows = 4096
    answered = [Event(), Event()]

    def soon(met: Event) -> Any:
        def behave(link: FakeLink, dispatch: Dispatch) -> None:
            answer(link, dispatch)
            met.set()

        return behave

    for node, met in zip(pair, answered, strict=True):
        failing(node, soon(met))
    x, ids = np.resize(X, (rows, HIDDEN)), np.resize(IDS, (rows, 3))
    finish = experts.begin_outputs(LAYER, mx.array(x), mx.array(ids))
    assert all(met.wait(20) for met in answered)
    later = 2 * exchange.SILENCE_S
    for module in (exchange, stream):
        monkeypatch.setattr(module, "monotonic", lambda: monotonic() + later)
    assert np.array_equal(np.array(finish()), np.resize(OUTPUTS, (rows, 3, HIDDEN)))


def test_working_is_not_silence(
    pair: list[FakeNode], experts: NetworkExperts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that says WORKING may take longer than silence is allowed to last."""
    monkeypatch.setattr(exchange, "SILENCE_S", 0.3)

    def slow(link: FakeLink, dispatch: Dispatch) -> None:
        until = monotonic() + 0.8
        while monotonic() < until:
            link.stream.send(link.connection.working())
            Event().wait(0.05)
        answer(link, dispatch)

    failing(pair[1], slow)
    np.testing.assert_allclose(summed(experts), SUM, rtol=1e-5)


@pytest.mark.parametrize("pause", [0.02, 0.0])
def test_working_for_ever_is_a_timeout(
    pair: list[FakeNode], experts: NetworkExperts, monkeypatch: pytest.MonkeyPatch, pause: float
) -> None:
    """A node that says WORKING for ever is given up at the limit, even if there is always more."""
    monkeypatch.setattr(exchange, "LIMIT_S", 0.4)

    def for_ever(link: FakeLink, dispatch: Dispatch) -> None:
        until = monotonic() + 4.0
        while monotonic() < until:
            link.stream.send(link.connection.working())
            Event().wait(pause)
        answer(link, dispatch)

    failing(pair[1], for_ever)
    with pytest.raises(NodeTimeout, match=r"worked on one dispatch for 0\.4 s"):
        summed(experts)


def test_a_refused_dispatch_keeps_the_link(pair: list[FakeNode], experts: NetworkExperts) -> None:
    """A node's refusal is its sentence and what to do; the link goes on."""
    failing(
        pair[1],
        lambda link, dispatch: link.stream.send(
            link.connection.error(ErrorCode.BAD_VALUES, "row 2 has a NaN")
        ),
    )
    with pytest.raises(
        NodeRefused,
        match=r"node b refuses: row 2 has a NaN, and no other .* \(3, 3\); try --wire f32",
    ) as caught:
        summed(experts)
    assert caught.value.code == ErrorCode.BAD_VALUES
    np.testing.assert_allclose(summed(experts), SUM, rtol=1e-5)
    assert len(pair[1].links) == 1


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_end_the_link(
    pair: list[FakeNode], experts: NetworkExperts, value: float
) -> None:
    """A reply of NaN or infinity is that node's failure, and never part of a sum."""

    def spoil(link: FakeLink, dispatch: Dispatch) -> None:
        reply = computed(dispatch)
        data = np.full(reply.data.shape, value, np.float32)
        link.stream.send(link.connection.reply(replace(reply, data=dispatch.dtype.encode(data))))

    failing(pair[1], spoil)
    with pytest.raises(NodeRefused, match="node b answered with values that are not finite"):
        summed(experts)
    np.testing.assert_allclose(summed(experts), SUM, rtol=1e-5)


def test_a_refusal_may_say_itself_what_to_do() -> None:
    """What a node advises replaces what the driver would have."""
    told = refusal("a", ErrorReply(ErrorCode.BAD_VALUES, "it overflows; choose a wider --wire"))
    assert str(told) == "node a refuses: it overflows; choose a wider --wire."
    error = ErrorReply(ErrorCode.MODEL, "it serves another model; give both one store")
    differs = link_refusal("a", error)
    assert isinstance(differs, NetworkMismatch)
    assert str(differs) == "node a refuses the link: it serves another model; give both one store."


@pytest.mark.parametrize("code", [ErrorCode.NUMERICS, ErrorCode.VERSION])
def test_any_refusal_of_a_dispatch_is_that_nodes_failure(
    pair: list[FakeNode], experts: NetworkExperts, code: ErrorCode
) -> None:
    """Once a link is greeted every refusal is NodeRefused, and the others may still reply."""
    refused = Event()

    def refuse(link: FakeLink, dispatch: Dispatch) -> None:
        link.stream.send(link.connection.error(code, "not so"))
        refused.set()

    def after_that(link: FakeLink, dispatch: Dispatch) -> None:
        refused.wait(20)
        answer(link, dispatch)

    failing(pair[1], refuse)
    failing(pair[0], after_that)
    with pytest.raises(NodeRefused, match="node b refuses: not so") as caught:
        summed(experts)
    assert caught.value.code == code
    np.testing.assert_allclose(summed(experts), SUM, rtol=1e-5)
    assert len(pair[0].links) == 1


def test_garbage_is_no_node(pair: list[FakeNode], experts: NetworkExperts) -> None:
    """Bytes that are no frame end the link, and the node is named."""
    failing(pair[1], lambda link, dispatch: link.sock.sendall(b"x" * 32))
    with pytest.raises(NotANode, match="node b sends what is not the protocol"):
        summed(experts)
    np.testing.assert_allclose(summed(experts), SUM, rtol=1e-5)


def test_a_late_reply_is_never_the_next_layers(
    pair: list[FakeNode], experts: NetworkExperts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reply that comes after its dispatch was given up goes nowhere."""
    monkeypatch.setattr(exchange, "SILENCE_S", 0.2)
    released = Event()

    def late(link: FakeLink, dispatch: Dispatch) -> None:
        released.wait(20)
        answer(link, dispatch)

    failing(pair[1], late)
    with pytest.raises(NodeTimeout):
        summed(experts, rows=2)
    monkeypatch.setattr(exchange, "SILENCE_S", 5.0)
    released.set()
    for rows in (1, 6, 2):
        np.testing.assert_allclose(summed(experts, rows), SUM[:rows], rtol=1e-5)


def test_a_link_that_ended_between_two_replies_is_no_error(
    pair: list[FakeNode], experts: NetworkExperts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that was started again while nobody spoke is simply linked again."""
    summed(experts)
    gone = pair[1].links[0]
    gone.stream.finish(gone.connection.goodbye("restart"))
    monkeypatch.setattr(network, "LOOK_S", 0.0)
    np.testing.assert_allclose(summed(experts), SUM, rtol=1e-5)
    assert len(pair[1].links) == 2


def test_long_unused_links_are_pinged(
    pair: list[FakeNode], experts: NetworkExperts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a long pause each node is asked whether it is there, before it is sent rows."""
    monkeypatch.setattr(network, "LOOK_S", 0.0)
    monkeypatch.setattr(network, "PING_S", 0.0)
    summed(experts)
    assert [node.pings for node in pair] == [1, 1]


def test_a_node_that_comes_back_as_another_is_refused(
    pair: list[FakeNode], experts: NetworkExperts
) -> None:
    """A link that is opened again goes through all checks; once they pass, all is well."""
    failing(pair[1], lambda link, dispatch: link.sock.close())
    with pytest.raises(NodeClosed):
        summed(experts)
    right = pair[1].welcome
    pair[1].welcome = replace(right, model_digest="b" * 64)
    with pytest.raises(NetworkMismatch, match="another model"):
        summed(experts)
    pair[1].welcome = right
    np.testing.assert_allclose(summed(experts), SUM, rtol=1e-5)


def test_nodes_may_come_back_under_another_roster(
    pair: list[FakeNode], experts: NetworkExperts
) -> None:
    """When all nodes are started again with another roster, it is the one that counts."""
    for node in pair:
        failing(node, lambda link, dispatch: link.sock.close())
    with pytest.raises(NodeClosed):
        summed(experts)
    other = Roster.parse("c,d=2")
    for node, name in zip(pair, ("d", "c"), strict=True):
        node.welcome = replace(
            node.welcome, node=name, roster=other.to_wire(), roster_digest=other.digest
        )
    np.testing.assert_allclose(summed(experts), SUM, rtol=1e-5)
    assert [node.name for node in experts._network.figures.nodes] == ["c", "d"]


def test_an_interrupt_closes_what_is_outstanding(
    pair: list[FakeNode], experts: NetworkExperts
) -> None:
    """A KeyboardInterrupt while replies are owed leaves no link on which one could come later."""
    released = Event()

    def interrupting(link: FakeLink, dispatch: Dispatch) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        released.wait(20)

    failing(pair[1], interrupting)
    with pytest.raises(KeyboardInterrupt):
        summed(experts)
    released.set()
    np.testing.assert_allclose(summed(experts), SUM, rtol=1e-5)
    assert len(pair[1].links) == 2


def test_the_hello_is_within_the_openers_time(
    pair: list[FakeNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sending the HELLO has what is left of the time for opening, and no time of its own."""
    given: list[float] = []
    send = FrameStream.send

    def noted(stream: FrameStream[Any], buffers: Any, timeout: float = SEND_TIMEOUT) -> None:
        if stream.peer == pair[0].url:
            given.append(timeout)
        send(stream, buffers, timeout)

    monkeypatch.setattr(FrameStream, "send", noted)
    Opener(None, HELLO, lambda layer: HIDDEN, timeout_s=2.0).open(pair[0].url).close()
    assert len(given) == 1 and 0 < given[0] < 2.0


def test_an_interrupted_opening_closes_what_it_opened(pair: list[FakeNode]) -> None:
    """An interrupt while links are opened leaves none of them open."""
    opener = Opener(None, HELLO, lambda layer: HIDDEN)
    opened: list[Link] = []

    def open_one(url: str) -> Link:
        if url == pair[0].url:
            raise KeyboardInterrupt
        opened.append(opener.open(url))
        return opened[0]

    with pytest.raises(KeyboardInterrupt):
        open_all([node.url for node in pair], open_one)
    assert [link.closed for link in opened] == [True]

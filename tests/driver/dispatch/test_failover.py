"""Who takes over what a node has not answered, and what the driver makes of it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Event
from time import monotonic
from typing import Any

import numpy as np
import pytest

from expert_driver.dispatch import exchange, prober
from expert_driver.dispatch.dispatcher import NetworkExperts
from expert_driver.dispatch.failover import take_over
from expert_driver.dispatch.links import Link, Opener
from expert_driver.dispatch.network import NOT_NOW, Network, open_all
from expert_driver.dispatch.pace import ENOUGH, LEAST_S, Pace
from expert_driver.dispatch.routing import split
from expert_network.errors import NodeClosed, NodeError, NodeRefused
from expert_protocol.frames import Dispatch, ErrorCode
from expert_roster.rendezvous import owner_order
from expert_roster.roster import Roster
from tests.driver.dispatch.asking import (
    HELLO,
    IDS,
    LAYER,
    OUTPUTS,
    SUM,
    WANTED,
    WEIGHTS,
    failing,
    separate,
    summed,
)
from tests.driver.fakes import HIDDEN, FakeLink, FakeNode, answer

Fault = Callable[[FakeLink, Dispatch], object]


@contextmanager
def network(
    replicas: int = 1, adopts: bool = True, exact: bool = False
) -> Iterator[tuple[list[FakeNode], NetworkExperts, list[str]]]:
    """Three nodes, experts over them, and what the network says of nodes that come and go."""
    roster = Roster.parse("a,b,c", replicas)
    said: list[str] = []
    nodes = [FakeNode(name, "a,b,c") for name in "abc"]
    for node in nodes:
        node.adopts = adopts
        node.welcome = replace(node.welcome, roster=roster.to_wire(), roster_digest=roster.digest)
    opener = Opener(None, HELLO, lambda layer: HIDDEN)
    connected = Network(
        [node.url for node in nodes], replace(WANTED, exact=exact), opener.open, said.append
    )
    try:
        yield nodes, NetworkExperts(connected), said
    finally:
        connected.close()
        for node in nodes:
            node.stop()


def hang_up(link: FakeLink, dispatch: Dispatch) -> None:
    link.sock.close()


def reset(link: FakeLink, dispatch: Dispatch) -> None:
    link.reset()


def garbage(link: FakeLink, dispatch: Dispatch) -> None:
    link.sock.sendall(b"\x00" * 64)


def refuse(link: FakeLink, dispatch: Dispatch) -> None:
    link.stream.send(link.connection.error(ErrorCode.INTERNAL, "no memory"))


FAULTS = [hang_up, reset, garbage, refuse]


# --- the decision


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("dead", ["a", "b", "c"])
def test_the_next_of_each_owner_order(replicas: int, dead: str) -> None:
    """Each pair goes to the first living node of its block's order, which adopts what it lacks."""
    roster = Roster.parse("a,b,c", replicas)
    alive = [name for name in "abc" if name != dead]
    orders = owner_order(roster, LAYER, np.arange(8))
    first = orders[:, 0]
    share = split(first[IDS], 3, IDS, WEIGHTS)[roster.index(dead)]
    assert share is not None
    found = {}
    for taken in take_over(roster, LAYER, [share], alive):
        name = alive[taken.node]
        for part in taken.shares:
            assert part.offsets[-1] == len(part.pairs) == len(part.ids)
            for row, pair, expert, weight in zip(
                np.repeat(part.rows, np.diff(part.offsets)),
                part.pairs,
                part.ids,
                part.weights,
                strict=True,
            ):
                assert IDS.flat[pair] == expert and WEIGHTS.flat[pair] == weight
                assert pair // IDS.shape[1] == row
                assert roster.names[orders[expert, 1]] == name
                found[int(pair)] = name
        assert taken.adopt == (replicas == 1)
    assert sorted(found) == share.pairs.tolist()


def test_nobody_is_left() -> None:
    """Where no node lives nobody takes over."""
    share = split(np.zeros_like(IDS), 1, IDS, WEIGHTS)[0]
    assert share is not None
    assert take_over(Roster.parse("a"), LAYER, [share], []) == []


# --- over links


@pytest.mark.parametrize("code", NOT_NOW)
def test_a_node_that_takes_no_links_now(code: int) -> None:
    """A node that is starting, stopping or busy when it is linked to is away, as a dead one is."""
    error = NodeRefused("b", "is shutting down", "wait", code)

    def open_link(url: str) -> Link:
        raise error

    assert open_all(["http://b"], open_link) == ({}, {"http://b": error})
    with pytest.raises(NodeRefused):
        error.code = ErrorCode.MODEL
        open_all(["http://b"], open_link)


def test_a_draining_node_is_left_out() -> None:
    """A node that hangs up and then refuses links fails no reply."""

    def drain(link: FakeLink) -> None:
        link.stream.send(link.connection.error(ErrorCode.DRAINING, "it is shutting down"))

    with network() as (nodes, experts, said):
        nodes[1].greet = drain
        failing(nodes[1], hang_up)
        for _ in range(3):
            np.testing.assert_allclose(summed(experts), SUM, rtol=1e-5)
        assert len(said) == 1 and "node b" in said[0]


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_leaves_no_circle(fault: Fault, rows: int) -> None:
    """A link that failed, and all that was computed with meanwhile, is soon let go of."""
    with network() as (nodes, experts, _):
        summed(experts, rows)
        links = [weakref.ref(link) for link in experts._network.links]
        gc.disable()
        try:
            for place, node in enumerate(nodes):
                failing(node, fault)
                for _ in range(3):  # the second opens another link, the third forgets the first
                    summed(experts, rows)
                left = [link() for link in links[: place + 1]]
                assert not any(link.closed for link in left if link is not None)
        finally:
            gc.enable()


@pytest.mark.parametrize("ask", [summed, separate])
@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_not_in_the_result(fault: Fault, replicas: int, rows: int, ask: Any) -> None:
    """What one node does not answer others do within the dispatch, with the same values."""
    expected = (SUM if ask is summed else OUTPUTS)[:rows]
    for place in range(3):
        with network(replicas) as (nodes, experts, _):
            for _ in range(2):  # the second is asked natively
                np.testing.assert_allclose(ask(experts, rows), expected, rtol=1e-5)
            met = failing(nodes[place], fault)
            np.testing.assert_allclose(ask(experts, rows), expected, rtol=1e-5)
            assert experts._network.figures.failovers == met.is_set()
            for _ in range(2):
                np.testing.assert_allclose(ask(experts, rows), expected, rtol=1e-5)


def test_outputs_keep_their_bits() -> None:
    """In exact mode the values are the same bits whoever has computed them."""
    with network(2) as (nodes, experts, _):
        before = separate(experts)
        failing(nodes[1], hang_up)
        assert np.array_equal(separate(experts), before)


def test_only_what_is_missing_is_asked_again() -> None:
    """Each pair is asked of others once, and what the other nodes owe goes on."""
    with network(2) as (nodes, experts, _):
        failing(nodes[1], hang_up)
        summed(experts)
        pairs = [len(d.ids) for node in (nodes[0], nodes[2]) for d in node.dispatches]
        assert sum(pairs) == IDS.size


def test_every_replica_may_fail() -> None:
    """When all owners of a block are gone, the node after them adopts it."""
    with network(2) as (nodes, experts, _):
        failing(nodes[0], hang_up)
        failing(nodes[1], hang_up)
        np.testing.assert_allclose(summed(experts), SUM, rtol=1e-5)
        assert any(dispatch.adopt for dispatch in nodes[2].dispatches)
        np.testing.assert_allclose(summed(experts), SUM, rtol=1e-5)


def test_adoption_is_asked_for_only_where_it_is_needed() -> None:
    """A replica is not asked to adopt what it owns."""
    with network(2) as (nodes, experts, _):
        failing(nodes[1], hang_up)
        summed(experts)
        summed(experts)
        assert not any(dispatch.adopt for node in nodes for dispatch in node.dispatches)


def test_a_block_that_nobody_has() -> None:
    """The reply fails, and the sentence names the block and the machine that had it."""
    with network(1, adopts=False) as (nodes, experts, _):
        failing(nodes[1], hang_up)
        started = monotonic()
        with pytest.raises(NodeClosed, match=r"node b .*no other node has its block \(3, \d\)"):
            summed(experts)
        assert monotonic() - started < 2.0
        # It was there again, and is simply asked.
        np.testing.assert_allclose(summed(experts), SUM, rtol=1e-5)


def test_a_block_that_nobody_has_while_its_node_is_away() -> None:
    """So does each reply after that, until the machine is back."""
    with network(1, adopts=False) as (nodes, experts, _):
        nodes[1].stop()
        for _ in range(2):
            with pytest.raises(NodeError, match=r"node b .*no other node has its block \(3, \d\)"):
                summed(experts)


def test_all_nodes_fail() -> None:
    """When nobody is left the first failure is reported, and the next reply asks all again."""
    with network(2) as (nodes, experts, _):
        for node in nodes:
            failing(node, hang_up)
        with pytest.raises(NodeClosed):
            summed(experts)
        np.testing.assert_allclose(summed(experts), SUM, rtol=1e-5)


def test_a_refusal_by_all_is_the_first_ones() -> None:
    """What every node refuses is reported as the first of them said it."""
    with network(3) as (nodes, experts, _):
        for node in nodes:
            node.behave = refuse
        with pytest.raises(NodeRefused, match="no memory"):
            summed(experts, 1)


def test_a_silent_node_is_left_sooner_than_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that answered fast has less than SILENCE_S, and the others do not wait for it."""
    monkeypatch.setattr("expert_driver.dispatch.pace.LEAST_S", 0.2)
    released = Event()
    with network(2) as (nodes, experts, said):
        for _ in range(ENOUGH + 1):
            summed(experts, 1)
        place = next(n for n in range(3) if nodes[n].dispatches)
        nodes[place].behave = lambda link, dispatch: (released.wait(20), None)[1]
        started = monotonic()
        np.testing.assert_allclose(summed(experts, 1), SUM[:1], rtol=1e-5)
        assert 0.1 < monotonic() - started < exchange.SILENCE_S / 2
        released.set()
        summed(experts, 1)
        assert "has sent nothing for" in said[0]


def test_a_node_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that is away is asked for nothing, and used again soon after it answers."""
    monkeypatch.setattr(prober, "PROBE_S", 0.01)
    with network(2) as (nodes, experts, said):
        back = Event()
        greet = nodes[1].greet

        def late(link: FakeLink) -> None:
            assert back.wait(20)
            greet(link)

        nodes[1].greet = late
        failing(nodes[1], hang_up)
        summed(experts)
        summed(experts)
        assert [link.name for link in experts._network.links] == ["a", "c"]
        assert len(said) == 1 and "node b closed the link; others compute" in said[0]
        back.set()
        deadline = monotonic() + 20
        while len(experts._network.links) < 3 and monotonic() < deadline:
            np.testing.assert_allclose(summed(experts), SUM, rtol=1e-5)
        assert said[1:] == ["node b is back."]
        names = [node.name for node in experts._network.figures.nodes]
        assert names == ["a", "b", "c"]


def test_a_node_that_is_not_there_at_first() -> None:
    """A driver starts without a node that does not answer, and says so."""
    roster = Roster.parse("a,b,c", 2)
    nodes = [FakeNode(name, "a,b,c") for name in "abc"]
    for node in nodes:
        node.welcome = replace(node.welcome, roster=roster.to_wire(), roster_digest=roster.digest)
    said: list[str] = []
    nodes[0].stop()
    opener = Opener(None, HELLO, lambda layer: HIDDEN)
    connected = Network([node.url for node in nodes], WANTED, opener.open, said.append)
    np.testing.assert_allclose(summed(NetworkExperts(connected)), SUM, rtol=1e-5)
    assert len(said) == 1 and nodes[0].url in said[0]
    connected.close()
    for node in nodes[1:]:
        node.stop()


def test_pace() -> None:
    """Silence is judged by what all but the slowest tenth of dispatches take."""
    pace = Pace()
    for _ in range(ENOUGH - 1):
        pace.saw(0.1)
    assert pace.silence == float("inf")
    pace.saw(30.0)
    assert LEAST_S < pace.silence < LEAST_S + 1
    for _ in range(100):
        pace.saw(0.0)
    assert pace.silence == LEAST_S


# --- hedging


def hedged(experts: NetworkExperts) -> NetworkExperts:
    """The same, asking replicas for what is late."""
    network = experts._network
    network.exchange.rivals = network._rivals
    return experts


@pytest.mark.parametrize("ask", [summed, separate])
def test_a_late_row_is_asked_of_replicas(ask: Any) -> None:
    """Whoever is first counts, once: a node that is late is neither waited for nor left out."""
    expected = (SUM if ask is summed else OUTPUTS)[:1]
    with network(2) as (nodes, plain, said):
        experts, released = hedged(plain), Event()
        for _ in range(ENOUGH + 2):
            ask(experts, 1)
        late = next(node for node in nodes if node.dispatches)

        def slow(link: FakeLink, dispatch: Dispatch) -> None:
            late.behave = answer
            assert released.wait(20)
            answer(link, dispatch)

        late.behave = slow
        started = monotonic()
        np.testing.assert_allclose(ask(experts, 1), expected, rtol=1e-5)
        assert monotonic() - started < 1.5  # which is less than any silence that is taken for death
        figures = experts._network.figures
        assert figures.hedges == 1 and figures.failovers == 0
        released.set()
        for _ in range(3):
            np.testing.assert_allclose(ask(experts, 1), expected, rtol=1e-5)
        assert not said and len(experts._network.links) == 3


def test_a_late_node_may_still_be_first() -> None:
    """When the late node answers before its rivals theirs goes nowhere."""
    with network(2) as (nodes, plain, _):
        experts = hedged(plain)
        for _ in range(ENOUGH + 2):
            summed(experts, 1)
        late = next(node for node in nodes if node.dispatches)
        asked, released = Event(), Event()

        def after_the_rivals(link: FakeLink, dispatch: Dispatch) -> None:
            late.behave = answer
            assert asked.wait(20)
            answer(link, dispatch)
            released.set()

        def later(link: FakeLink, dispatch: Dispatch) -> None:
            asked.set()
            assert released.wait(20)
            answer(link, dispatch)

        late.behave = after_the_rivals
        for node in nodes:
            if node is not late and not node.dispatches:
                node.behave = later
        others = [node for node in nodes if node is not late and node.dispatches]
        for node in others:
            node.behave = _second_time(later)
        np.testing.assert_allclose(summed(experts, 1), SUM[:1], rtol=1e-5)
        for node in nodes:
            node.behave = answer
        for _ in range(3):
            np.testing.assert_allclose(summed(experts, 1), SUM[:1], rtol=1e-5)


def _second_time(behave: Any) -> Any:
    """Answer once, and do `behave` after that."""
    count = [0]

    def both(link: FakeLink, dispatch: Dispatch) -> None:
        count[0] += 1
        (answer if count[0] == 1 else behave)(link, dispatch)

    return both


def test_rivals_that_fail_leave_the_late_one_alone() -> None:
    """A rival's failure is no failure of the dispatch: who is late is waited for."""
    with network(2) as (nodes, plain, _):
        experts = hedged(plain)
        for _ in range(ENOUGH + 2):
            summed(experts, 1)
        late = next(node for node in nodes if node.dispatches)
        asked = Event()

        def slow(link: FakeLink, dispatch: Dispatch) -> None:
            late.behave = answer
            assert asked.wait(20)
            answer(link, dispatch)

        def hang(link: FakeLink, dispatch: Dispatch) -> None:
            asked.set()
            hang_up(link, dispatch)

        late.behave = slow
        for node in nodes:
            if node is not late:
                node.behave = _second_time(hang) if node.dispatches else hang
        np.testing.assert_allclose(summed(experts, 1), SUM[:1], rtol=1e-5)
        for node in nodes:
            node.behave = answer
        np.testing.assert_allclose(summed(experts, 1), SUM[:1], rtol=1e-5)


def test_nothing_is_hedged_without_replicas() -> None:
    """A node is never asked to adopt a block only since its owner is late."""
    with network(1) as (nodes, plain, _):
        experts = hedged(plain)
        for _ in range(ENOUGH + 2):
            summed(experts, 1)
        for _ in range(20):
            summed(experts, 1)
        assert experts._network.figures.hedges == 0
        assert not any(dispatch.adopt for node in nodes for dispatch in node.dispatches)

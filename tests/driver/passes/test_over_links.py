"""Passes at once over real links, whose nodes fail in the middle."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from itertools import count

import numpy as np
import pytest

from expert_driver.config import Sampling
from expert_driver.engine import Engine
from expert_driver.stopping import stopped_by_interrupt
from expert_network.errors import Cancelled, NodeClosed
from expert_network.model.seam import Mode
from expert_protocol.frames import Dispatch
from tests.driver.fakes import FakeLink, FakeNode, answer
from tests.driver.passes.test_passes import CHUNKS, IDS, read
from tests.driver.remote import remote


@pytest.mark.parametrize("mode", ["sum", "exact"])
def test_interleaved_dispatches_change_no_bit(mode: Mode) -> None:
    """Nodes that are asked for two passes at once answer what they answer for one."""
    with remote(mode) as (engine, _):
        together = read(engine)
        assert engine.passes.interleaves
        engine.passes.interleaves = False
        assert np.array_equal(read(engine), together)


def at_dispatch(node: FakeNode, moment: int, act: Callable[[FakeLink], None]) -> None:
    """Let `node` do this once, in place of its moment-th answer."""
    number = count(1)

    def behave(link: FakeLink, dispatch: Dispatch) -> None:
        if next(number) == moment:
            act(link)
        else:
            answer(link, dispatch)

    node.behave = behave


@pytest.mark.parametrize("moment", (1, 2, 4, 7))
def test_a_node_that_ends_its_link_fails_both_passes(moment: int) -> None:
    """The error comes out, and over new links the same context gives what a fresh one does."""
    with remote() as (engine, nodes):
        at_dispatch(nodes[0], moment, lambda link: link.stream.close())
        check_broken_off(engine, NodeClosed)


def press(link: FakeLink) -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("moment", [1, 4])
def test_an_interrupt_ends_both_passes(moment: int) -> None:
    """KeyboardInterrupt comes out of whichever pass was waiting."""
    with remote() as (engine, nodes):
        at_dispatch(nodes[0], moment, press)
        check_broken_off(engine, KeyboardInterrupt)


@pytest.mark.parametrize("moment", [1, 4])
def test_a_first_ctrl_c_ends_both_passes_at_their_next_layer(moment: int) -> None:
    """Where it asks to stop, what was asked for is not waited for, and Cancelled comes out."""
    with remote() as (engine, nodes), stopped_by_interrupt(engine.stop):

        def press_and_answer(link: FakeLink) -> None:
            press(link)
            answer(link, nodes[0].dispatches[-1])

        at_dispatch(nodes[0], moment, press_and_answer)
        check_broken_off(engine, Cancelled)


def check_broken_off(engine: Engine, error: type[BaseException]) -> None:
    """Reading CHUNKS raises `error`, and reading goes on as if nothing had been."""
    context = engine.context()
    with pytest.raises(error):
        list(engine.passes.run(context, CHUNKS))
    engine.stop.requested = False
    assert context.tokens in ([], IDS[:12], IDS[:17], IDS[:29])
    again = list(engine.generate(IDS, context, Sampling(max_tokens=4)))
    assert again == list(engine.generate(IDS, engine.context(), Sampling(max_tokens=4)))

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator

import pytest

from expert_network.net import patience
from expert_network.net.patience import Patience

SOON, LONG = 0.001, 20.0


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, select.poll]]:
    one, other = socket.socketpair()
    poll = select.poll()
    poll.register(one, select.POLLIN)
    with one, other:
        yield other, poll


class Counting:
    """A poll that counts how often it was asked."""

    def __init__(self, found: bool) -> None:
        self.asked, self._found = 0, found

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        assert timeout == 0
        self.asked += 1
        return [(0, 0)] if self._found else []


def test_what_has_come_is_found(pair: tuple[socket.socket, select.poll]) -> None:
    """Bytes that are there are found at once, and left where they are."""
    peer, poll = pair
    peer.send(b"x")
    assert Patience(LONG).look(poll)
    assert poll.poll(0)


def test_nothing_comes(pair: tuple[socket.socket, select.poll]) -> None:
    """Without bytes it gives up after its time."""
    assert not Patience(SOON).look(pair[1])


def test_looking_in_vain_is_not_repeated() -> None:
    """After looking in vain it does not look for a while, longer each time; success ends that."""
    looking, poll = Patience(SOON), Counting(found=False)

    def looked() -> bool:
        before = poll.asked
        looking.look(poll)  # type: ignore[arg-type]
        return poll.asked > before

    assert [looked() for _ in range(12)] == [True, False, True, *3 * [False], True, *5 * [False]]
    assert not any(looked() for _ in range(2))
    poll._found = True
    assert all(looked() for _ in range(3))
    poll._found = False
    assert [looked() for _ in range(3)] == [True, False, True]


@pytest.mark.parametrize(("cores", "looks"), [(1, False), (3, False), (4, True), (64, True)])
def test_few_cores_are_left_to_others(
    cores: int, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are few cores it never looks."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setattr(patience, "LOOK_S", SOON)
    poll = Counting(found=True)
    assert Patience().look(poll) == looks  # type: ignore[arg-type]
    assert bool(poll.asked) == looks

"""Whatever happens to one machine in the middle of a reply, it goes on exactly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.scenarios.stage import Stage, stage
from tests.scenarios.transcript import Scenario

TWO_OWNERS = [
    """
    roster a b c, replicas 2
    generate 40
    kill b at layer 5 of token 20
    expect same tokens, at most 6 s more
    """,
    """
    roster a b c, replicas 2
    generate 40
    freeze c at layer 0 of token 7
    expect same tokens, at most 6 s more
    """,
    """
    roster a b c, replicas 2
    generate 40
    half-open a at layer 7 of token 1
    expect same tokens, at most 6 s more
    """,
    """
    roster a b c, replicas 2
    generate 40
    reset a at layer 3 of token 5
    corrupt a reply of b at layer 2 of token 6
    corrupt a dispatch to c at layer 4 of token 30
    expect same tokens, at most 6 s more
    """,
    """
    roster a b c, replicas 2
    generate 40
    drip b at layer 6 of token 0
    expect same tokens, at most 6 s more
    """,
]
ONE_OWNER = [
    """
    roster a b c, replicas 1
    generate 40
    kill b at layer 5 of token 20
    expect same tokens, at most 6 s more
    """,
]


@pytest.fixture(scope="module")
def two_owners() -> Iterator[Stage]:
    with stage(("a", "b", "c"), 2) as there:
        yield there


def names(text: str) -> str:
    return "; ".join(text.split("\n", 3)[3].strip().splitlines()[0].split()[:2])


@pytest.mark.parametrize("text", TWO_OWNERS, ids=names)
def test_with_two_owners(two_owners: Stage, text: str) -> None:
    """The second owner answers within the layer."""
    check(two_owners, text)


@pytest.mark.parametrize("text", ONE_OWNER, ids=names)
def test_with_one_owner_and_stores(text: str) -> None:
    """The next node takes the block over from its disk."""
    with stage(("a", "b", "c"), 1) as there:
        check(there, text)


def check(there: Stage, text: str) -> None:
    scenario = Scenario.parse(text)
    played = there.play(scenario)
    assert played.problem(scenario) is None, played


def test_transcripts_are_read_back() -> None:
    """A scenario writes itself as it was written."""
    for text in TWO_OWNERS:
        scenario = Scenario.parse(text)
        assert Scenario.parse(str(scenario)) == scenario
    with pytest.raises(ValueError, match="explode b"):
        Scenario.parse(TWO_OWNERS[0].replace("kill b", "explode b"))

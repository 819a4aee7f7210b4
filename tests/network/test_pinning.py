"""expert_network.net.pinning: no manifest is believed because one peer says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from expert_network.errors import InputError, NetworkMismatch, NodeUnreachable, NotANode, StoreError
from expert_network.net.pinning import pinned
from expert_network.store.reader import Store
from tests.support.peers import corrupt, refuse, serving_store
from tests.support.servers import unused_port
from tests.support.stores import write_store

DIGEST = "0f" * 32


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    write_store(tmp_path / "whole")
    return tmp_path / "whole"


def digest_of(path: Path) -> str:
    return Store.open(path).digest


async def test_two_that_agree(whole: Path, tmp_path: Path) -> None:
    """Two peers that say the same are believed; one that is away is told of."""
    told: list[str] = []
    away = f"http://127.0.0.1:{unused_port()}"
    async with serving_store(whole) as one, serving_store(whole) as two:
        urls = [one.url, away, two.url]
        found = await pinned(tmp_path / "d", None, urls, None, None, told.append)
    assert found == digest_of(whole)
    assert len(told) == 1 and away in told[0]


async def test_peers_that_disagree(whole: Path, tmp_path: Path) -> None:
    """Peers with different manifests are listed, and none is chosen."""
    write_store(tmp_path / "other", experts=2)
    async with serving_store(whole) as one, serving_store(tmp_path / "other") as two:
        with pytest.raises(NetworkMismatch, match=f"{one.url}: .*{two.url}: .*manifest-sha256"):
            await pinned(tmp_path / "d", None, [one.url, two.url], None, None)


@pytest.mark.parametrize("answer", [True, False, None])
async def test_one_alone(whole: Path, tmp_path: Path, answer: bool | None) -> None:
    """One peer is believed if a person says so; else the sentence has the digest to give."""
    asked: list[str] = []

    async def confirm(question: str) -> bool:
        asked.append(question)
        return bool(answer)

    digest = digest_of(whole)
    async with serving_store(whole) as one, serving_store(whole, faults={"/manifest": refuse}) as n:
        urls = [one.url, n.url]
        if answer:
            assert await pinned(tmp_path / "d", None, urls, None, confirm) == digest
        else:
            ask = None if answer is None else confirm
            with pytest.raises(InputError, match=rf"{digest} is .* --manifest-sha256"):
                await pinned(tmp_path / "d", None, urls, None, ask)
    assert all(digest in question and one.url in question for question in asked)
    assert len(asked) == (answer is not None)


async def test_what_was_given_is_not_asked_about(tmp_path: Path) -> None:
    """A digest that was given decides alone."""
    assert await pinned(tmp_path / "d", DIGEST, ["http://127.0.0.1:9"], None, None) == DIGEST


async def test_what_is_here_stays(whole: Path) -> None:
    """A store that was begun keeps its manifest; another one that is asked for is refused."""
    assert await pinned(whole, None, [], None, None) == digest_of(whole)
    assert await pinned(whole, digest_of(whole), [], None, None) == digest_of(whole)
    with pytest.raises(StoreError, match=r"the store here has the manifest .* and 0f0f"):
        await pinned(whole, DIGEST, [], None, None)


async def test_nobody_answers(whole: Path, tmp_path: Path) -> None:
    """Without an answer there is nothing to agree on; what is no manifest is no answer."""
    with pytest.raises(NodeUnreachable):
        await pinned(tmp_path, None, [f"127.0.0.1:{unused_port()}"], None, None)
    async with serving_store(whole, faults={"/manifest": corrupt}) as bad:
        with pytest.raises(NotANode, match=rf"{bad.url} sends a manifest .*is damaged"):
            await pinned(tmp_path, None, [bad.url], None, None)

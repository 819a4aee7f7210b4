"""Sums that are asked for and not yet waited for: the seam over experts that overlap."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import pytest

from expert_network.model.deferred import Deferred, Pending
from expert_network.model.seam import find_switches, install
from tests.network import families, family_runs
from tests.network.test_seam import HIDDEN, TOP_K, Block, Counting, Model, usual


class Remote(Counting):
    """Experts that overlap, and a record of what was begun and what was waited for."""

    def begin_outputs(self, layer: int, x: mx.array, ids: mx.array) -> Callable[[], mx.array]:
        return partial(self.outputs, layer, x, ids)

    def begin_sum(self, *asked: Any) -> Callable[[], mx.array]:
        self.asked.append(("begun", (), ()))
        return partial(self.weighted_sum, *asked)

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _, _ in self.asked]


@pytest.fixture
def remote() -> Remote:
    return Remote(Model(Block(usual)))


def pending(remote: Remote) -> tuple[Any, Any]:
    """A sum that is pending, and what it will be."""
    x, ids = mx.random.normal((2, 4, HIDDEN)), mx.zeros((2, 4, TOP_K), mx.uint32)
    scores = mx.random.uniform(shape=(2, 4, TOP_K))
    found = usual(Deferred(remote, 0, x, ids, overlap=True), scores)
    return found, usual(remote.modules[0](x, ids), scores)


def test_a_sum_is_asked_for_at_once_and_waited_for_at_its_first_use(remote: Remote) -> None:
    """Between the two there is time, and however often it is used it is waited for once."""
    found, expected = pending(remote)
    assert issubclass(type(found), Pending) and found.shape == expected.shape
    assert remote.kinds == ["begun"]
    assert mx.allclose(1 + found, 1 + expected) and mx.allclose(found[..., 0], expected[..., 0])
    assert remote.kinds == ["begun", "sum"]


def test_a_cast_or_a_factor_does_not_wait(remote: Remote) -> None:
    """Families that cast or scale the sum before they add to it overlap as the others do."""
    found, expected = pending(remote)
    other = (found * 2.5).astype(mx.float16)
    assert other.dtype == mx.float16 and remote.kinds == ["begun"]
    assert mx.allclose(other.__mlx_array__(), (expected * 2.5).astype(mx.float16))
    assert found.astype(found.dtype) is found


def test_what_is_added_begins_before_the_wait(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared expert is computed while the nodes compute the others."""
    begin: Any = mx.async_eval

    def begun(*arrays: mx.array) -> None:
        remote.asked.append(("shared", (), ()))
        begin(*arrays)

    monkeypatch.setattr(mx, "async_eval", begun)
    found, expected = pending(remote)
    shared = mx.ones(expected.shape)
    assert mx.allclose(found + shared, expected + shared)
    assert remote.kinds == ["begun", "shared", "sum"]


def test_a_block_that_cannot_take_a_pending_sum_gets_an_array() -> None:
    """It still asks for sums; blocks of other types overlap."""

    class Other(Block):
        pass

    model = Model(Block(usual), Other(lambda y, s: mx.softmax(usual(y, s))))
    seams = install(model, Remote(model), "sum")
    assert [(seam.mode, seam.overlap) for seam in seams] == [("sum", True), ("sum", False)]


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3", "qwen3_next"])
def test_overlap_changes_no_bit(family: str) -> None:
    """Families with shared experts give the bits that they give without any overlap."""

    def logits(make: Callable[[Any], Counting]) -> family_runs.Logits:
        model = families.build(family)
        experts = make(model)
        assert find_switches(model)
        install(model, experts, "sum")
        found = family_runs.logits(model)
        assert ("begun" in {kind for kind, _, _ in experts.asked}) == (make is Remote)
        return found

    assert (logits(Counting) == logits(Remote)).all()

"""Splitting a layer's rows over nodes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert_driver.dispatch.routing import Share, split


def pairs_of(share: Share) -> list[tuple[int, int]]:
    """(row, pair) as the CSR form tells it."""
    found = []
    for place, row in enumerate(share.rows.tolist()):
        start, stop = share.offsets[place : place + 2].tolist()
        found += [(row, pair) for pair in share.pairs[start:stop].tolist()]
    return found


@given(
    st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 4)).flatmap(
        lambda size: st.tuples(
            st.lists(
                st.lists(st.integers(0, size[2] - 1), min_size=size[1], max_size=size[1]),
                min_size=size[0],
                max_size=size[0],
            ),
            st.just(size[2]),
        )
    )
)
def test_every_pair_goes_to_its_owner_once(case: tuple[list[list[int]], int]) -> None:
    """Each (row, expert) pair is in the share of its owner and in no other, in ascending order."""
    owners, nodes = np.array(case[0], np.int32), case[1]
    k = owners.shape[1]
    ids = np.arange(owners.size, dtype=np.uint32).reshape(owners.shape) + 7
    weights = (ids / 2).astype(np.float32)
    shares = split(owners, nodes, ids, weights)
    assert len(shares) == nodes
    for node, share in enumerate(shares):
        mine = np.argwhere(owners == node).tolist()
        expected = [(row, row * k + slot) for row, slot in mine]
        assert (pairs_of(share) if share else []) == expected
        if share:
            assert np.array_equal(share.ids, share.pairs + 7)
            assert np.array_equal(share.weights, share.ids / 2)
            assert share.ids.dtype == np.uint16 and share.weights.dtype == np.float32
            assert share.offsets.dtype == np.uint32 and share.offsets[0] == 0
            assert (share.offsets[1:] > share.offsets[:-1]).all()


@pytest.mark.parametrize("step", [1, 2, 3, 100])
def test_parts_make_up_the_whole(step: int) -> None:
    """Parts of a share hold its rows and pairs in order, with offsets from zero."""
    owners = np.random.default_rng(1).integers(0, 2, (7, 3))
    share = split(owners, 2, owners + 5, np.ones((7, 3), np.float32))[0]
    assert share is not None
    parts = [share.part(start, start + step) for start in range(0, len(share.rows), step)]
    assert [pair for part in parts for pair in pairs_of(part)] == pairs_of(share)
    assert all(part.offsets[0] == 0 for part in parts)
    for name in ("ids", "weights"):
        whole = np.concatenate([getattr(part, name) for part in parts])
        assert np.array_equal(whole, getattr(share, name))

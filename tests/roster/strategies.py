"""Random rosters for the properties, and the model shapes they are tried on."""

from __future__ import annotations

import string

from hypothesis import strategies as st

from expert_roster.roster import MAX_WEIGHT, MIN_WEIGHT, Roster

names = st.text(string.ascii_letters + string.digits + "._-", min_size=1, max_size=64)
weights = st.one_of(
    st.integers(1, 256).map(float), st.floats(MIN_WEIGHT, MAX_WEIGHT, allow_subnormal=False)
)


@st.composite
def rosters(draw: st.DrawFn, min_nodes: int = 1, max_nodes: int = 12) -> Roster:
    """A valid roster, often with fewer replicas than nodes."""
    nodes = draw(st.dictionaries(names, weights, min_size=min_nodes, max_size=max_nodes))
    replicas = draw(st.integers(1, len(nodes)))
    return Roster(tuple(nodes.items()), replicas, draw(st.integers(0, 2**32 - 1)))


#: (layer, experts), with a gap in the layers and layers of different sizes, as real models have.
SHAPE = [(1, 16), (2, 16), (5, 7)]

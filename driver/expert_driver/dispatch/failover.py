"""Who takes over what a node has not answered: the next living node of each block's owner order.

Pure decisions: nothing is sent here.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from expert_driver.dispatch.agreement import first_of
from expert_driver.dispatch.routing import Share, divide
from expert_network.errors import NodeError
from expert_roster.rendezvous import owner_order
from expert_roster.roster import Roster


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """What one node takes over. adopt: it does not own all of these blocks."""

    node: int
    shares: Sequence[Share]
    adopt: bool


def take_over(
    roster: Roster, layer: int, shares: Sequence[Share], alive: Sequence[str]
) -> list[Taken]:
    """Who computes `shares` of a layer; `node` counts in `alive`, which names who can be asked.

    Empty if nobody can.
    """
    if not alive:
        return []
    position = np.full(len(roster.names), -1, np.int32)
    for place, name in enumerate(alive):
        position[roster.index(name)] = place
    by_node: dict[int, list[Share]] = {}
    adopting: set[int] = set()
    for share in shares:
        places = position[owner_order(roster, layer, share.ids.astype(np.intp))]
        chosen = first_of(places)
        owned: npt.NDArray[Any] = (places[:, : roster.replicas] == chosen[:, None]).any(axis=1)
        for node in np.unique(chosen).tolist():
            part = divide(share, chosen, node)
            assert part is not None
            by_node.setdefault(node, []).append(part)
        adopting.update(chosen[~owned].tolist())
    return [Taken(node, parts, node in adopting) for node, parts in sorted(by_node.items())]


def lost(cause: NodeError, layer: int, expert: int) -> NodeError:
    """What is reported when nobody takes over a block of the node that failed by `cause`."""
    found = copy(cause)
    found.problem = f"{cause.problem}, and no other node has its block ({layer}, {expert})"
    return found

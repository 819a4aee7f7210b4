"""What nodes say of themselves, and whether they can work together: reading, judging, showing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from expert_driver.dispatch.agreement import describe
from expert_network.errors import RosterError
from expert_network.store.manifest import is_digest
from expert_network.units import duration, size
from expert_roster.roster import Roster


@dataclass(frozen=True)
class NodeStatus:
    """One row: what the node at `url` says, or in `error` why it says nothing.

    `blocks` are the (layer, expert) pairs that it holds; `links` counts its drivers.
    """

    url: str
    error: str | None = None
    name: str = ""
    health: str = ""
    protocol: int = 0
    software: str = ""
    model_digest: str = ""
    roster: Roster | None = None
    numerics: str = ""
    total_blocks: int = 0
    partition_bytes: int = 0
    links: int = 0
    uptime_s: float = 0.0
    rss_bytes: int = 0
    blocks: frozenset[tuple[int, int]] = field(default_factory=frozenset)

    @classmethod
    def read(cls, url: str, health: object, status: object) -> NodeStatus:
        """From the JSON of /health and /status, none of which is trusted. Never raises."""
        try:
            return cls._read(url, _table(health), _table(status))
        except (KeyError, TypeError, ValueError, RosterError) as error:
            problem = f"the status of node {url} is not understood ({error})"
            return cls(url, f"{problem}; install one version everywhere")

    @classmethod
    def _read(cls, url: str, health: Mapping[str, Any], status: Mapping[str, Any]) -> NodeStatus:
        partition = _table(status["partition"])
        layers = _table(partition["layers"])
        return cls(
            url,
            None,
            _text(status["name"]),
            _text(health["status"]),
            _count(status["protocol"]),
            _text(status["software"]),
            _digest(status["model_digest"]),
            Roster.from_wire(status["roster"]),
            _text(status["numerics"]),
            _count(partition["total_blocks"]),
            _count(partition["bytes"]),
            _count(status["links"]),
            _seconds(status["uptime_s"]),
            _count(status["rss_bytes"]),
            frozenset((int(layer), _count(e)) for layer, ids in layers.items() for e in ids),
        )


def problems(nodes: Sequence[NodeStatus]) -> list[str]:
    """What keeps these nodes from working together, a sentence each; empty when nothing does."""
    found = [f"{node.error}." for node in nodes if node.error]
    there = [node for node in nodes if not node.error]
    found += [f"node {node.name} is {node.health}." for node in there if node.health != "ok"]
    if there:
        found += _differences(there)
        found += _coverage(there)
    return found


def _differences(nodes: Sequence[NodeStatus]) -> list[str]:
    found = []
    names = [node.name for node in nodes]
    for name in sorted({name for name in names if names.count(name) > 1}):
        urls = ", ".join(node.url for node in nodes if node.name == name)
        found.append(f"{urls} are all node {name}; start every node with a --me of its own.")
    for what, advice, values in (
        ("protocol versions", "install one version of expert-network everywhere",
         {node.name: str(node.protocol) for node in nodes}),
        ("models", "start them with the same store",
         {node.name: node.model_digest[:12] for node in nodes}),
        ("rosters", "start them with the same --roster",
         {node.name: describe(node.roster) for node in nodes if node.roster}),
    ):  # fmt: skip
        if len(set(values.values())) > 1:
            listed = "; ".join(f"{name}: {value}" for name, value in values.items())
            found.append(f"the nodes have different {what} ({listed}); {advice}.")
    return found


def _coverage(nodes: Sequence[NodeStatus]) -> list[str]:
    total = max(node.total_blocks for node in nodes)
    owned = frozenset[tuple[int, int]]().union(*(node.blocks for node in nodes))
    if len(owned) >= total:
        return []
    roster = nodes[0].roster
    absent = sorted(set(roster.names if roster else ()) - {node.name for node in nodes})
    whose = f"; {', '.join(absent)} of the roster did not answer" if absent else ""
    return [f"{total - len(owned)} of {total} blocks have no owner here{whose}."]


#: What differs from node to node, in 80 columns; `shared` says the rest.
HEADERS = ("node", "address", "health", "blocks", "bytes", "links", "up", "memory")


def row(node: NodeStatus) -> tuple[str, ...]:
    """One node as cells under HEADERS."""
    address = node.url.removeprefix("http://").removesuffix("/")
    if node.error:
        return ("?", address, "no status", *[""] * (len(HEADERS) - 3))
    return (
        node.name,
        address,
        node.health,
        f"{len(node.blocks)}/{node.total_blocks}",
        size(node.partition_bytes),
        str(node.links),
        duration(node.uptime_s),
        size(node.rss_bytes),
    )


def shared(nodes: Sequence[NodeStatus]) -> list[str]:
    """Model, roster and numerics, a line for each that nodes have; with names where they differ."""
    told = [node for node in nodes if not node.error]
    lines = []
    for what, tell in (
        ("model", lambda node: node.model_digest[:12]),
        ("roster", lambda node: f"{node.roster.digest[:12]}, epoch {node.roster.epoch}"),
        ("numerics", lambda node: node.numerics),
    ):
        values: dict[str, list[str]] = {}
        for node in told:
            values.setdefault(tell(node), []).append(node.name)
        for value, names in values.items():
            whose = "" if len(values) == 1 else f"  ({', '.join(names)})"
            lines.append(f"{what:<9} {value}{whose}")
    return lines


def as_json(nodes: Sequence[NodeStatus]) -> dict[str, Any]:
    """The same for programs: nodes with all fields but the single blocks, and the problems."""
    return {"nodes": [_plain(node) for node in nodes], "problems": problems(nodes)}


def _plain(node: NodeStatus) -> dict[str, Any]:
    fields = asdict(node)
    fields["blocks"] = len(node.blocks)
    fields["roster"] = node.roster and node.roster.to_wire() | {"digest": node.roster.digest}
    return fields


def _table(value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("a table is missing")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError("a text is missing")
    return value


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError("a number is missing")
    return value


def _seconds(value: object) -> float:
    if not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise ValueError("a time is missing")
    return float(value)


def _digest(value: object) -> str:
    # It becomes the name of a folder of the cache.
    if not isinstance(value, str) or not is_digest(value):
        raise ValueError("the model digest is missing")
    return value

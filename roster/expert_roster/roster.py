"""The roster: the named nodes, with weights, that share one model.

A `Roster` is checked when it is made and sorted by name, so every other module can trust it and
two rosters that mean the same are equal. docs/roster.md has the words, the TOML form and the
bytes that the digest is made of.
"""

from __future__ import annotations

import hashlib
import re
import struct
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from expert_network.errors import RosterError

#: More nodes than anyone runs; bounds what a peer can make us rank.
MAX_NODES = 4096
#: Weights outside these would let a score (up to 2**53 times the weight) overflow or lose digits.
MIN_WEIGHT, MAX_WEIGHT = 1e-9, 1e18
#: The epoch travels as u32.
MAX_EPOCH = 2**32 - 1

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HOW_TO_WRITE = "write it as a,b or with weights as a=64,b=16"
_LISTED_NAMES = 50
_CANONICAL_HEADER = "expert-roster 1"


@dataclass(frozen=True)
class Roster:
    """Nodes by name and weight, replicas R, and an epoch that is not part of the digest.

    `nodes` may be given in any order and is kept sorted by name. Raises RosterError when there is
    no node, a name is malformed or stands twice, a weight is not a number between MIN_WEIGHT and
    MAX_WEIGHT, `replicas` is not in 1..len(nodes), or `epoch` does not fit a u32.
    """

    nodes: tuple[tuple[str, float], ...]
    replicas: int = 1
    epoch: int = 0

    def __post_init__(self) -> None:
        nodes = tuple(sorted((_name(name), _weight(name, weight)) for name, weight in self.nodes))
        object.__setattr__(self, "nodes", nodes)
        _check_count(len(nodes))
        _check_unique([name for name, _ in nodes])
        _whole_number("replicas", self.replicas, 1, MAX_NODES)
        _whole_number("epoch", self.epoch, 0, MAX_EPOCH)
        if self.replicas > len(nodes):
            raise RosterError(
                f"replicas is {self.replicas} and the roster names {len(nodes)} node(s); "
                "lower the replicas or add nodes."
            )

    @classmethod
    def parse(cls, text: str, replicas: int = 1) -> Roster:
        """The roster written as 'a,b' (weight 1 each) or 'a=64,b=16'."""
        if not text.strip():
            raise RosterError(f"the roster is empty; {_HOW_TO_WRITE}.")
        return cls(tuple(_parse_node(item.strip()) for item in text.split(",")), replicas)

    @classmethod
    def from_toml(cls, text: str) -> Roster:
        """The roster in a TOML text: `replicas`, `epoch`, and a table `nodes` of name = weight."""
        try:
            table = tomllib.loads(text)
        # TOMLDecodeError, an integer of thousands of digits, or brackets as deep as that
        except (ValueError, RecursionError) as error:
            raise RosterError(f"the roster is not valid TOML: {error}.") from None
        unknown = sorted(table.keys() - {"nodes", "replicas", "epoch"})
        if unknown:
            raise RosterError(
                f"the roster has an unknown key {unknown[0]!r}; "
                "it may have replicas, epoch and the table [nodes]."
            )
        return cls(_toml_nodes(table), table.get("replicas", 1), table.get("epoch", 0))

    @classmethod
    def from_spec(
        cls, spec: str, read_text: Callable[[str], str], replicas: int | None = None
    ) -> Roster:
        """What `--roster` was given: a file (ends in .toml or has a `/`), else a list of names.

        `read_text` reads the file. `replicas`, unless None, wins over what the file says.
        """
        if not (spec.endswith(".toml") or "/" in spec):
            return cls.parse(spec, 1 if replicas is None else replicas)
        try:
            roster = cls.from_toml(read_text(spec))
            return roster if replicas is None else cls(roster.nodes, replicas, roster.epoch)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise RosterError(f"the roster file {spec} cannot be read: {reason}.") from None
        except RosterError as error:
            raise RosterError(f"{spec}: {error}") from None

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Node names, sorted; every node index counts in this order."""
        return tuple(name for name, _ in self.nodes)

    @cached_property
    def weights(self) -> npt.NDArray[np.float64]:
        """Weights in the order of `names`: float64 (n_nodes,), read-only."""
        weights = np.array([weight for _, weight in self.nodes], np.float64)
        weights.flags.writeable = False
        return weights

    @cached_property
    def canonical(self) -> bytes:
        """The bytes whose sha256 is the digest: names, weights and replicas, without the epoch."""
        lines = [_CANONICAL_HEADER, f"replicas {self.replicas}"]
        lines += [f"{name} {struct.pack('>d', weight).hex()}" for name, weight in self.nodes]
        return "".join(f"{line}\n" for line in lines).encode("ascii")

    @cached_property
    def digest(self) -> str:
        """sha256 of `canonical`, as 64 hex digits."""
        return hashlib.sha256(self.canonical).hexdigest()

    def index(self, name: str) -> int:
        """Where `name` stands in `names`. Raises RosterError, listing the names, if it does not."""
        try:
            return self.names.index(name)
        except ValueError:
            listed = ", ".join(self.names[:_LISTED_NAMES])
            more = len(self.names) - _LISTED_NAMES
            tail = f" and {more} more" if more > 0 else ""
            raise RosterError(
                f"node {name!r} is not in the roster, which names {listed}{tail}; "
                "choose one of these or add it to the roster on every machine."
            ) from None

    def to_wire(self) -> dict[str, Any]:
        """Plain types for msgpack or JSON; `from_wire` reads them back."""
        nodes = [[name, weight] for name, weight in self.nodes]
        return {"nodes": nodes, "replicas": self.replicas, "epoch": self.epoch}

    @classmethod
    def from_wire(cls, message: object) -> Roster:
        """The roster a peer sent, checked like any other, and against its `digest` if it has one.

        Other keys are left alone. Raises RosterError.
        """
        if not isinstance(message, Mapping):
            raise RosterError("the peer's roster is not a table of nodes, replicas and epoch.")
        nodes = message.get("nodes")
        if not isinstance(nodes, list | tuple):
            raise RosterError("the peer's roster has no list of nodes.")
        _check_count(len(nodes))
        if not all(isinstance(node, list | tuple) and len(node) == 2 for node in nodes):
            raise RosterError("the peer's roster has a node that is not a name and a weight.")
        pairs = tuple((name, weight) for name, weight in nodes)
        roster = cls(pairs, message.get("replicas", 1), message.get("epoch", 0))
        if message.get("digest", roster.digest) != roster.digest:
            raise RosterError(
                "the peer's roster does not have the digest it states; "
                "install the same version of expert-network on every machine."
            )
        return roster


def _parse_node(item: str) -> tuple[str, float]:
    name, equals, weight = item.partition("=")
    if not equals:
        return name, 1.0
    try:
        return name.strip(), float(weight)
    except ValueError:
        raise RosterError(
            f"the weight of node {name.strip()!r} is {weight.strip()!r}, which is not a number; "
            f"{_HOW_TO_WRITE}."
        ) from None


def _toml_nodes(table: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    nodes = table.get("nodes")
    if not isinstance(nodes, dict):
        raise RosterError(
            "the roster has no table of nodes; write [nodes] and then a line "
            "name = weight for each node."
        )
    for name, weight in nodes.items():
        if isinstance(weight, dict):
            raise RosterError(f'a node name with a dot needs quotes: "{name}.…" = weight.')
        # In TOML every line after [nodes] belongs to it, so these would silently become nodes.
        if name in ("replicas", "epoch"):
            raise RosterError(f"{name} stands below [nodes], as if a node; move it above [nodes].")
    return tuple(nodes.items())


def _name(name: object) -> str:
    if isinstance(name, str) and _NAME.fullmatch(name):
        return name
    if name == "":
        raise RosterError(f"the roster has an empty node name; {_HOW_TO_WRITE}.")
    raise RosterError(
        f"{_shown(name)} is not a node name; "
        "use 1 to 64 letters, digits, dots, hyphens or underscores."
    )


def _weight(name: object, weight: object) -> float:
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise RosterError(
            f"the weight of node {name!r} is {_shown(weight)}, which is not a number."
        )
    if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise RosterError(
            f"the weight of node {name!r} is {_shown(weight)}; "
            f"it must lie between {MIN_WEIGHT:g} and {MAX_WEIGHT:g}."
        )
    return float(weight)


def _check_count(count: int) -> None:
    if count == 0:
        raise RosterError(f"the roster names no node; {_HOW_TO_WRITE}.")
    if count > MAX_NODES:
        raise RosterError(f"the roster names {count} nodes; at most {MAX_NODES} are supported.")


def _check_unique(sorted_names: Iterable[str]) -> None:
    previous = None
    for name in sorted_names:
        if name == previous:
            raise RosterError(f"the roster names node {name!r} twice; give every node its own.")
        previous = name


def _whole_number(what: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RosterError(f"{what} is {_shown(value)}; it must be a whole number.")
    if not low <= value <= high:
        raise RosterError(f"{what} is {_shown(value)}; it must lie between {low} and {high}.")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"

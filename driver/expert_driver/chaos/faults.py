"""What can go wrong on a connection, and the point of a reply at which it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Flag, auto


class Way(Flag):
    """The directions of a connection."""

    TO_NODE = auto()
    TO_DRIVER = auto()
    BOTH = TO_NODE | TO_DRIVER


@dataclass(frozen=True)
class Delay:
    """Each byte comes `seconds` later, and up to `jitter` more; order is kept."""

    seconds: float
    jitter: float = 0.0
    way: Way = Way.BOTH


@dataclass(frozen=True)
class Throttle:
    """No more than `rate` bytes a second go through."""

    rate: float
    way: Way = Way.BOTH


@dataclass(frozen=True)
class Drip:
    """One byte goes through, and another one `seconds` later."""

    seconds: float
    way: Way = Way.BOTH


@dataclass(frozen=True)
class HalfOpen:
    """Nothing goes through any more, and the connection stays open: a peer that lost its power."""

    way: Way = Way.BOTH


@dataclass(frozen=True)
class Corrupt:
    """Bit `bit` of the byte after `offset` others is flipped."""

    offset: int = 0
    bit: int = 0
    way: Way = Way.TO_DRIVER


@dataclass(frozen=True)
class Cut:
    """The connection ends: both sides are reset or, without `reset`, see a clean end (FIN)."""

    reset: bool = True


@dataclass(frozen=True)
class Call:
    """`action` is called, by the proxy's thread: to kill or stop a node's process at the point."""

    action: Callable[[], None]


@dataclass(frozen=True)
class Heal:
    """What the connection suffers ends; if it has lost bytes, by a reset."""


Fault = Delay | Throttle | Drip | HalfOpen | Corrupt | Cut | Call | Heal


@dataclass(frozen=True, order=True)
class Point:
    """The first DISPATCH of `layer` in the pass that makes token `token`; both count from 0.

    A prompt is read in several passes: they all belong to token 0.
    """

    token: int
    layer: int


@dataclass(frozen=True)
class Planned:
    """A fault that waits for its point: the first DISPATCH there, or later, to `node`.

    Without a node, it strikes whichever is asked first. Its connection suffers it from that
    frame's first byte on. `lasting`: so does every other connection of the node, those that are
    yet to be made included, until the proxy is told to heal.
    """

    fault: Fault
    point: Point
    node: str | None = None
    lasting: bool = False


@dataclass(frozen=True)
class Fired:
    """That a planned fault struck, where, and when (`perf_counter` seconds)."""

    planned: Planned
    node: str
    point: Point
    at: float

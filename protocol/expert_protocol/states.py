"""Where a link stands, and which frame takes it where: all that may be sent, and when.

An absent cell is the error. Both ends keep the same state, so one end's sending is the other's
receiving. This file does not know which end we are.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from expert_protocol.header import ErrorCode, Kind


class State(IntEnum):
    """Where a link stands. The same on both ends, but for what is still under way."""

    FRESH = 0
    GREETING = 1
    IDLE = 2
    WAITING = 3
    PINGED = 4
    CLOSED = 5
    #: Something that is not the protocol came in. One last refusal may go out.
    FAILED = 6


Table = Mapping[State, Mapping[Kind, State]]

DRIVER_SENDS: Table = {
    State.FRESH: {Kind.HELLO: State.GREETING, Kind.GOODBYE: State.CLOSED},
    State.GREETING: {Kind.GOODBYE: State.CLOSED},
    State.IDLE: {
        Kind.DISPATCH: State.WAITING,
        Kind.PING: State.PINGED,
        Kind.GOODBYE: State.CLOSED,
    },
    State.WAITING: {Kind.DISPATCH: State.WAITING, Kind.GOODBYE: State.CLOSED},
    State.PINGED: {Kind.GOODBYE: State.CLOSED},
    State.CLOSED: {},
    State.FAILED: {Kind.GOODBYE: State.CLOSED},
}

# While more dispatches are outstanding, a REPLY or ERROR leaves the link WAITING instead of IDLE.
# An ERROR about the link itself (sequence 0), or with one of FATAL's codes, closes it whatever
# stands here.
NODE_SENDS: Table = {
    State.FRESH: {Kind.ERROR: State.CLOSED, Kind.GOODBYE: State.CLOSED},
    State.GREETING: {
        Kind.WELCOME: State.IDLE,
        Kind.ERROR: State.CLOSED,
        Kind.GOODBYE: State.CLOSED,
    },
    State.IDLE: {Kind.ERROR: State.CLOSED, Kind.GOODBYE: State.CLOSED},
    State.WAITING: {
        Kind.REPLY: State.IDLE,
        Kind.WORKING: State.WAITING,
        Kind.ERROR: State.IDLE,
        Kind.GOODBYE: State.CLOSED,
    },
    State.PINGED: {
        Kind.PING: State.IDLE,
        Kind.ERROR: State.CLOSED,
        Kind.GOODBYE: State.CLOSED,
    },
    State.CLOSED: {},
    State.FAILED: {Kind.ERROR: State.CLOSED, Kind.GOODBYE: State.CLOSED},
}

#: After these the two ends no longer agree on where a frame starts, or never will agree.
FATAL = frozenset({ErrorCode.PROTOCOL, ErrorCode.VERSION, ErrorCode.TOO_LARGE})


def after_error(state: State, code: ErrorCode, sequence: int) -> State:
    """The state after an ERROR of that code and sequence, where a table's cell is `state`."""
    return State.CLOSED if code in FATAL or not sequence else state

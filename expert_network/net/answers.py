"""What an HTTP answer that is not the wanted one means, as one of our errors.

A node's own errors are JSON, {"error": "a sentence"}. Anything else is somebody else's server.
"""

from __future__ import annotations

import json

from expert_network.errors import (
    ExpertNetworkError,
    KeyRefused,
    NodeClosed,
    NodeRefused,
    NodeTimeout,
    NodeUnreachable,
    NotANode,
)

#: Bytes of an error's body that are read.
MAX_ERROR_BODY = 16 << 10
#: Characters of a peer's words that are shown.
MAX_SENTENCE = 500

_ADVICE = {
    403: "look at that node's log",
    404: "ask a node that has it",
    409: "try again when that is over",
    429: "try again later",
    503: "wait until it is ready, then try again",
}


def printable(text: str, limit: int = MAX_SENTENCE) -> str:
    """A peer's words made safe for a terminal: no control characters, not too long."""
    safe = "".join(c if c.isprintable() else " " for c in text[: limit + 1]).strip()
    return safe if len(safe) <= limit else safe[:limit] + "..."


def sentence_of(body: bytes) -> str | None:
    """The sentence in a node's error; None if `body` is not one."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    error = found.get("error") if isinstance(found, dict) else None
    return printable(error).removesuffix(".") if isinstance(error, str) else None


def refusal(url: str, status: int, reason: str, body: bytes, what: str) -> ExpertNetworkError:
    """The error for a `status` that is no success; `what` was asked for, as in "/manifest"."""
    sentence = sentence_of(body)
    if sentence is None or 300 <= status < 400:
        reason = printable(reason, 60)
        return not_a_node(url, f"answered {what} with {status} {reason}".rstrip())
    problem = f"answered {what} with {status}: {sentence}"
    return NodeRefused(url, problem, _ADVICE.get(status, "look at that node's log"), status)


def not_a_node(url: str, problem: str) -> NotANode:
    """`problem` is something that no expert-node does."""
    advice = "check the address and the port: something other than an expert-node listens there"
    return NotANode(url, problem, advice)


def unreachable(url: str, failure: OSError) -> NodeUnreachable:
    """No connection could be made."""
    if isinstance(failure, ConnectionRefusedError):
        advice = "start expert-node there, or check the address and the port"
        return NodeUnreachable(url, "refused the connection: nothing listens", advice)
    problem = f"cannot be reached ({failure.strerror or failure})"
    return NodeUnreachable(url, problem, "check the address and the network")


def name_unknown(url: str, failure: OSError) -> NodeUnreachable:
    """The host's name has no address."""
    problem = f"has a name that cannot be found ({failure.strerror or failure})"
    return NodeUnreachable(url, problem, "check the name, or give its IP address")


def not_accepted(url: str, seconds: float) -> NodeTimeout:
    """Packets vanish on the way to it."""
    problem = f"did not accept a connection within {seconds:g} s"
    return NodeTimeout(url, problem, "check that the machine is up and the port open")


def not_answered(url: str, seconds: float) -> NodeTimeout:
    """It accepted the connection, and that was all."""
    problem = f"accepted the connection and did not answer within {seconds:g} s"
    advice = "check that an expert-node listens there and is not overloaded"
    return NodeTimeout(url, problem, advice)


def closed_unanswered(url: str) -> NodeClosed:
    """It ended the connection instead of answering, as a TLS port does, or a node that dies."""
    problem = "closed the connection without an answer"
    return NodeClosed(url, problem, "check that an expert-node listens there, without TLS")


def key_needed(url: str, given: bool) -> KeyRefused:
    """A 401: no key was `given`, or the wrong one."""
    if given:
        return KeyRefused(
            f"node {url} refused the cluster key; give the same key file that it was started with."
        )
    return KeyRefused(
        f"node {url} needs the cluster key; give it with --key-file or EXPERT_NETWORK_KEY."
    )


def key_not_proved(url: str) -> KeyRefused:
    """The server let us in without showing that it knows the key."""
    return KeyRefused(
        f"node {url} did not prove that it knows the cluster key; start it with the same "
        "--key-file, or leave the key out here if that network has none."
    )

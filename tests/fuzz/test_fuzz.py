"""Whatever is sent is parsed, or refused with our errors: a short `python -m tests.fuzz`."""

from __future__ import annotations

import pytest

from tests.fuzz.driver import run_driver
from tests.fuzz.live import run_live
from tests.fuzz.running import Outcome, run
from tests.fuzz.target import Never, Target
from tests.fuzz.targets import targets

SEED = 1
#: What comes is an error, or meant for another request, whatever it is.
ALL_REFUSED = ("error of a node", "proof of a key")


def told(outcome: Outcome) -> str:
    return "\n".join(f"{data!r}\n{text}" for data, text in outcome.failures.values())


@pytest.mark.parametrize("target", targets(), ids=lambda target: target.name)
def test_decoders(target: Target) -> None:
    """A decoder takes its valid inputs, and refuses others as it says."""
    outcome = run(target, 300, SEED)
    assert outcome.sound, told(outcome)
    assert outcome.parsed + outcome.refused == 300
    assert outcome.parsed or target.name in ALL_REFUSED


def test_a_node() -> None:
    """A node that was sent anything serves a good driver as before, its memory and files flat."""
    outcome = run_live(1500, SEED)
    assert outcome.sound, told(outcome)
    assert outcome.parsed > 100 < outcome.refused


def test_a_driver() -> None:
    """A driver that was sent anything fails with our errors, and is right when it asks anew."""
    outcome = run_driver(150, SEED)
    assert outcome.sound, told(outcome)
    assert outcome.parsed and outcome.refused > 50


def test_a_fault_is_seen() -> None:
    """An error that is not ours, and one that only sometimes comes, is reported with its input."""

    def fragile(data: bytes) -> None:
        if data.startswith(b"X"):
            raise KeyError("x")

    outcome = run(Target("fragile", fragile, [b"Xa"], Never), 50, SEED)
    assert not outcome.sound
    ((kind, (data, text)),) = outcome.failures.items()
    assert kind.startswith("KeyError at") and data == b"Xa" and "fragile" in text

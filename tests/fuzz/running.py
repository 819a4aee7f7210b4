"""Inputs to a decoder, one after the other: what it made of them, and what it should not have."""

from __future__ import annotations

import resource
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from time import perf_counter
from types import FrameType

from tests.fuzz.mutation import noise
from tests.fuzz.target import Target

#: Seconds for one input: thousands of times what the slowest takes, on a machine that is busy.
PATIENCE = 10.0
#: Bytes by which the process may have grown at most while a decoder ran.
GROWTH = 64 << 20
#: The share of inputs that make no sense at all.
_NOISE = 0.05


class Hang(BaseException):
    """A decoder did not come back. Not an Exception, so that none of ours is taken for it."""


@dataclass
class Outcome:
    """What became of `parsed` + `refused` + failed inputs of a decoder; bytes of `growth`."""

    name: str
    parsed: int = 0
    refused: int = 0
    seconds: float = 0.0
    growth: int = 0
    failures: dict[str, tuple[bytes, str]] = field(default_factory=dict)

    @property
    def sound(self) -> bool:
        return not self.failures and self.growth <= GROWTH

    def fail(self, error: BaseException, data: bytes) -> None:
        """Note an error that should not have been raised. Of one kind, the first is kept."""
        last = traceback.extract_tb(error.__traceback__)[-1]
        kind = f"{type(error).__name__} at {last.filename}:{last.lineno}"
        text = "".join(traceback.format_exception(error))
        self.failures.setdefault(kind, (data, text))

    def note(self, problem: str, data: bytes = b"") -> None:
        """Note what should not have been."""
        self.failures.setdefault(problem.partition("\n")[0], (data, problem))

    def line(self) -> str:
        """For a person."""
        state = "ok" if self.sound else "FAILED"
        return (
            f"{self.name:<26} {self.parsed:>8,} parsed {self.refused:>8,} refused "
            f"{self.seconds:>6.1f} s {self.growth / 1e6:>6.1f} MB  {state}"
        )


def run(target: Target, count: int, seed: int) -> Outcome:
    """Give the decoder its seeds, then `count` inputs, and note all that it should not do."""
    outcome, began, before = Outcome(target.name), perf_counter(), peak()
    for data in target.seeds:
        one(target, data, outcome)
    random = Random(f"{seed} {target.name}")
    for _ in range(count - len(target.seeds)):
        data = noise(random) if random.random() < _NOISE else target.mutate(random, target.seeds)
        one(target, data, outcome)
    outcome.seconds, outcome.growth = perf_counter() - began, peak() - before
    return outcome


def one(target: Target, data: bytes, outcome: Outcome) -> None:
    """Give the decoder one input."""
    try:
        with patience():
            target.run(data)
        outcome.parsed += 1
    except target.refused:
        outcome.refused += 1
    except (Exception, Hang) as error:
        outcome.fail(error, data)


@contextmanager
def patience() -> Iterator[None]:
    """Within, what takes longer than PATIENCE raises Hang. In the main thread only."""

    def expired(number: int, frame: FrameType | None) -> None:
        raise Hang(f"nothing came within {PATIENCE:g} s")

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def peak() -> int:
    """The most bytes that this process has had in memory."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024

"""What processes take over time, and whether it grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import linear_regression, median
from typing import Any

import psutil

#: What may be added from the second third of a run to the last: bytes, or a share of what there is.
RSS_BYTES, RSS_SHARE = 8 << 20, 0.03
#: Descriptors, or threads: a link that is just being opened.
FEW = 4


@dataclass(frozen=True)
class Sample:
    """One look at one process; `at` in minutes from the start."""

    at: float
    rss: int
    descriptors: int
    threads: int


@dataclass
class Series:
    """All looks at one process."""

    samples: list[Sample] = field(default_factory=list)

    def look(self, process: psutil.Process, at: float) -> None:
        """Add a sample; nothing if the process is no more."""
        try:
            with process.oneshot():
                rss, threads = int(process.memory_info().rss), int(process.num_threads())
                self.samples.append(Sample(at, rss, int(process.num_fds()), threads))
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            pass

    def trends(self) -> dict[str, Trend]:
        """What became of each quantity; empty for too few samples to say."""
        if len(self.samples) < 9:
            return {}
        times = [sample.at for sample in self.samples]
        return {
            name: trend(name, times, [getattr(sample, name) for sample in self.samples])
            for name in ("rss", "descriptors", "threads")
        }

    @property
    def flat(self) -> bool:
        """Whether nothing grows."""
        return all(found.flat for found in self.trends().values())

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        trends = {name: asdict(found) for name, found in self.trends().items()}
        return {"samples": len(self.samples), "flat": self.flat, **trends}


@dataclass(frozen=True)
class Trend:
    """One quantity of one process.

    growth: the median of the last third less that of the second; what comes in the first third is
    warming up. per_minute: the slope of a line through the last two thirds.
    """

    first: float
    last: float
    growth: float
    per_minute: float
    flat: bool


def trend(name: str, times: Sequence[float], values: Sequence[float]) -> Trend:
    """What `values` (at least 9, at `times` minutes) do once warmed up."""
    third = len(values) // 3
    middle, late = median(values[third : 2 * third]), median(values[2 * third :])
    slope = linear_regression(times[third:], values[third:]).slope
    allowed = max(RSS_BYTES, RSS_SHARE * middle) if name == "rss" else FEW
    growth = late - middle
    return Trend(values[0], values[-1], growth, slope, growth <= allowed)

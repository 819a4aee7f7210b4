"""Samples of one measurement, and what is said of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

_LISTED = 64  # samples that JSON lists one by one; longer series only as percentiles


@dataclass
class Series:
    """Samples of `what`, in `unit`, for one variant, by round; `at` says where: "512 tokens"."""

    what: str
    at: str
    unit: str
    variant: str = ""
    rounds: list[list[float]] = field(default_factory=list)

    @property
    def samples(self) -> list[float]:
        """All of them, in the order in which they were taken."""
        return [sample for some in self.rounds for sample in some]

    @property
    def key(self) -> tuple[str, str]:
        """What variants are compared by."""
        return self.what, self.at

    @property
    def median(self) -> float:
        return median(self.samples)

    def percentile(self, percent: int) -> float:
        """The value that `percent` (1 to 99) of the samples do not exceed, interpolated."""
        samples = self.samples
        if len(samples) < 2:
            return samples[0]
        return quantiles(samples, n=100, method="inclusive")[percent - 1]

    def as_json(self) -> dict[str, Any]:
        """All of it, for programs."""
        samples = self.samples
        plain: dict[str, Any] = {
            "what": self.what,
            "at": self.at,
            "unit": self.unit,
            "variant": self.variant,
            "count": len(samples),
            "median": self.median,
            "least": min(samples),
            "most": max(samples),
        }
        if len(samples) > _LISTED:
            return plain | {"p10": self.percentile(10), "p99": self.percentile(99)}
        return plain | {"samples": samples}


class Samples:
    """Every series of a run, in the order in which they were first met."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, str, str], Series] = {}

    def add(self, what: str, at: str, unit: str, variant: str, *values: float) -> None:
        """Put the values of one round into the series of that name."""
        series = self._series.setdefault((what, at, variant), Series(what, at, unit, variant))
        series.rounds.append(list(values))

    @property
    def series(self) -> list[Series]:
        return list(self._series.values())


def ratios(series: Series, base: Series) -> Series:
    """`series` over `base`, round by round, of each round's medians."""
    pairs = zip(series.rounds, base.rounds, strict=True)
    made = [[median(one) / median(other)] for one, other in pairs]
    return Series(series.what, series.at, "x", f"{series.variant} / {base.variant}", made)


def compared(found: Sequence[Series], first: str) -> list[Series]:
    """The ratios of every other variant to the variant `first`, where both measured the same."""
    bases = {series.key: series for series in found if series.variant == first}
    return [
        ratios(series, bases[series.key])
        for series in found
        if series.variant != first and series.key in bases
    ]

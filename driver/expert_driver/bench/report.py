"""A benchmark's result: JSON for programs, and a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from expert_driver import tables
from expert_driver.bench.samples import Series, compared
from expert_driver.bench.settings import WARM_UP, Settings

FORMAT = "expert-network-bench"


@dataclass(frozen=True)
class Report:
    """`subject` says what was measured, `conditions` where; the first variant is the base."""

    subject: dict[str, Any]
    conditions: dict[str, Any]
    settings: Settings
    variants: tuple[str, ...]
    series: Sequence[Series]

    @property
    def ratios(self) -> list[Series]:
        """Every other variant over the first, of the samples of the same round."""
        return compared(self.series, self.variants[0])

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        return {
            "format": FORMAT,
            "version": 1,
            "subject": self.subject,
            "conditions": self.conditions,
            "settings": asdict(self.settings) | {"warm_up": list(WARM_UP)},
            "variants": list(self.variants),
            "measurements": [series.as_json() for series in self.series],
            "ratios": [series.as_json() for series in self.ratios],
        }

    def show(self, stream: TextIO) -> None:
        """Write it for a person: what and where, then a row for each measurement."""
        for line in self._head():
            print(line, file=stream)
        print(file=stream)
        with_variant = len(self.variants) > 1
        rows = [_row(series, with_variant) for series in [*self.series, *self.ratios]]
        names = ("variant",) if with_variant else ()
        headers = ("measured", "at", *names, "median", "unit", "least", "most")
        tables.show(headers, rows, stream, numbers=("median", "least", "most"))

    def _head(self) -> list[str]:
        said, where = self.subject, self.conditions
        reading, decoding = WARM_UP
        versions = ", ".join(f"{name} {found}" for name, found in where["packages"].items())
        threads = f", {said['threads']} threads" if said["threads"] else ""
        return [
            f"{said['name']} ({said['model_type']}, {said['layers']} MoE layers of "
            f"{said['experts']} experts) {said['where']}; {said['computing']}{threads}",
            f"{where['cpu']}, {where['cores']} cores, {where['system']}; "
            f"load {where['load']} before, {where['load_after']} after",
            f"expert-network {where['expert-network']}, {versions}; {where['date']}",
            f"{self.settings.rounds} rounds, variants interleaved, after a warm-up of {reading} "
            f"tokens read and {decoding} decoded",
        ]


def _row(series: Series, with_variant: bool) -> tuple[str, ...]:
    names = (series.variant,) if with_variant else ()
    samples = series.samples
    most = number(max(samples))
    if len(samples) >= 100:  # the most of so many says little
        most = f"p99 {number(series.percentile(99))}"
    figures = (number(series.median), series.unit, number(min(samples)), most)
    return (series.what, series.at, *names, *figures)


def number(value: float) -> str:
    """Three digits that count: 0.0123, 1.23, 12.3, 1234."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f}" if abs(value) >= 1 else f"{value:.3g}"

"""Growth is told from warming up and noise, and a short soak is flat and right."""

from __future__ import annotations

from random import Random

import pytest

from tests.soak.running import run
from tests.soak.samples import FEW, RSS_BYTES, Sample, Series, trend

MB = 1 << 20


def series(rss: list[float], descriptors: list[float] | None = None) -> Series:
    counts = descriptors or [20.0] * len(rss)
    made = [
        Sample(n / 10, int(r), int(d), 9) for n, (r, d) in enumerate(zip(rss, counts, strict=True))
    ]
    return Series(made)


def test_warming_up_and_noise_are_flat() -> None:
    """What is taken once at the beginning, and what comes and goes, is no growth."""
    random = Random(3)
    warming = [100 * MB + min(n, 10) * 5 * MB + random.uniform(0, 4 * MB) for n in range(60)]
    assert series(warming).flat


@pytest.mark.parametrize("count", [9, 60, 1000])
def test_growth_is_seen(count: int) -> None:
    """Memory that grows by more than is allowed in a third of the run is seen, and its slope."""
    step = 3 * 1.2 * RSS_BYTES / count
    found = series([100 * MB + n * step for n in range(count)]).trends()["rss"]
    assert not found.flat
    assert found.per_minute == pytest.approx(10 * step, rel=0.01)


def test_descriptors_that_leak_are_seen() -> None:
    """A descriptor that is left open now and then is growth, though memory is flat."""
    counts = [20.0 + n // 4 for n in range(60)]
    found = series([100 * MB] * 60, counts)
    assert not found.flat and found.trends()["rss"].flat
    assert not found.trends()["descriptors"].flat
    assert trend("descriptors", [0.1 * n for n in range(12)], [20.0] * 8 + [20.0 + FEW] * 4).flat


def test_too_few_samples_say_nothing() -> None:
    """A process that was killed soon has no trend."""
    assert series([1.0 * MB, 900.0 * MB]).flat and not series([1.0]).trends()


def test_a_short_soak() -> None:
    """Replies stay right while nodes die, are stopped and come back; nothing grows."""
    report = run(0.08, seed=5)
    assert report.sound, report.as_json()
    assert report.replies > 1 and sum(report.incidents.values()) > 0
    assert {"driver", "node a"} <= set(report.series)

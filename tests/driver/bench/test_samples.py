"""Samples: what is said of a series, and which are compared with which."""

from __future__ import annotations

import numpy as np
import pytest

from expert_driver.bench.samples import Samples, compared


def test_percentiles_are_numpys() -> None:
    """Median and percentiles are those of a statistics library that is not ours."""
    values = np.random.default_rng(0).lognormal(size=501)
    samples = Samples()
    samples.add("dispatch", "1 row", "us", "", *values[:250])
    samples.add("dispatch", "1 row", "us", "", *values[250:])
    (series,) = samples.series
    assert series.median == pytest.approx(np.median(values))
    assert series.percentile(99) == pytest.approx(np.percentile(values, 99))
    plain = series.as_json()
    assert (plain["count"], plain["least"], plain["most"]) == (501, values.min(), values.max())
    assert "samples" not in plain and plain["p99"] == series.percentile(99)


def test_ratios_are_taken_within_a_round() -> None:
    """A machine that slows down for everyone between two rounds changes no ratio."""
    samples = Samples()
    for speed in (1.0, 0.25):
        samples.add("decode", "128 tokens", "tok/s", "bf16", 40 * speed)
        samples.add("decode", "128 tokens", "tok/s", "int8", 60 * speed)
        samples.add("traffic", "a token", "KB", "int8", 100.0)  # which bf16 has not
    (ratio,) = compared(samples.series, "bf16")
    assert ratio.samples == [1.5, 1.5]
    assert (ratio.what, ratio.variant, ratio.unit) == ("decode", "int8 / bf16", "x")


def test_a_ratio_is_of_a_rounds_medians() -> None:
    """One stray sample of many in a round is not in the ratio."""
    samples = Samples()
    samples.add("dispatch", "1 row", "us", "a", 10.0, 10.0, 9000.0)
    samples.add("dispatch", "1 row", "us", "b", 20.0, 1.0, 20.0)
    assert compared(samples.series, "a")[0].samples == [2.0]

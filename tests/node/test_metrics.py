"""expert_node.metrics: what is counted is what Prometheus reads."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from expert_node.metrics import BOUNDS, GAUGES, Counters, Counts, Histogram, exposition
from expert_protocol.frames import ErrorCode


def read(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Samples by name and labels, through prometheus_client's own parser."""
    families = text_string_to_metric_families(text.decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_exposition() -> None:
    """Every count, gauge and label comes out under its name."""
    counters = Counters()
    counters.computed(rows=3, pairs=7, queued=0.0, computed=0.002)
    counters.refused(ErrorCode.NOT_OWNED)
    counters.link_opened()
    gauges = dict.fromkeys([*GAUGES, "received_bytes", "sent_bytes"], 5.0)
    samples = read(exposition(counters, {"name": "a", "version": "1"}, lambda: gauges)())
    plain = {name: value for (name, labels), value in samples.items() if not labels}
    assert plain["expert_node_dispatches_total"] == 1
    assert plain["expert_node_rows_total"] == 3
    assert plain["expert_node_pairs_total"] == 7
    assert plain["expert_node_received_bytes_total"] == 5
    assert plain["expert_node_partition_blocks"] == 5
    assert plain["expert_node_compute_seconds_sum"] == 0.002
    assert plain["expert_node_queue_seconds_count"] == 1
    assert samples["expert_node_errors_total", (("code", "not_owned"),)] == 1
    assert samples["expert_node_errors_total", (("code", "busy"),)] == 0
    assert samples["expert_node_build_info", (("name", "a"), ("version", "1"))] == 1
    assert samples["expert_node_compute_seconds_bucket", (("le", "0.001"),)] == 0
    assert samples["expert_node_compute_seconds_bucket", (("le", "0.0025"),)] == 1


def test_counts_are_read_when_asked() -> None:
    """The same exposition shows what has been counted since."""
    counters = Counters()
    gauges = dict.fromkeys([*GAUGES, "received_bytes", "sent_bytes"], 0.0)
    expose = exposition(counters, {}, lambda: gauges)
    expose()
    counters.computed(1, 1, 0.0, 0.0)
    assert read(expose())["expert_node_dispatches_total", ()] == 1


def test_links_that_count_for_themselves() -> None:
    """What a source counts while it is watched is counted once, and stays when it is forgotten."""
    before, after = [0] * (len(BOUNDS) + 1), [0] * (len(BOUNDS) + 1)
    before[0], after[0], after[2] = 5, 6, 2
    now = Counts(5, 5, 9, 0.5, 1.0, before, before)
    counters = Counters()
    counters.computed(1, 1, 0.0, 0.0)

    def source() -> Counts:
        return now

    counters.watch(source)
    now = Counts(8, 8, 20, 0.75, 3.0, after, after)
    counters.refresh()
    counters.forget(source)
    now = Counts(90, 90, 90, 9.0, 9.0, after, after)
    counters.refresh()
    assert (counters.dispatches, counters.rows, counters.pairs) == (4, 4, 12)
    assert (counters.queue.total, counters.compute.total) == (0.25, 2.0)
    assert counters.queue.counts[:3] == [2, 0, 2]


@pytest.mark.parametrize("seconds", [0.0, BOUNDS[0], BOUNDS[3], 1e9])
def test_bounds_are_inclusive(seconds: float) -> None:
    """A duration counts in every bucket whose bound it does not exceed, as Prometheus has it."""
    histogram = Histogram()
    histogram.observe(seconds)
    for name, count in histogram.buckets():
        assert count == (seconds <= float(name))

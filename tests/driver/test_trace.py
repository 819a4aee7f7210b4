"""The trace is what viewers of Chrome trace events can read, whatever ends it."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest

from expert_driver import trace
from expert_driver.figures import DispatchTimes, NodeTimes
from expert_driver.times import Watch
from expert_driver.trace import TraceFile, Tracer, tracing, watching
from expert_network.errors import InputError

Events = list[dict[str, Any]]
MS = 1e-3


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


def read(file: Path) -> Events:
    """The events of a trace, after a look at what the format asks of each."""
    events = json.loads(file.read_text(encoding="utf-8"))
    assert isinstance(events, list)
    for event in events:
        assert event["ph"] in ("X", "M") and isinstance(event["name"], str)
        assert type(event["pid"]) is type(event["tid"]) is int
        assert isinstance(event["args"], dict)
        if event["ph"] == "X":
            assert type(event["ts"]) is type(event["dur"]) is int
            assert event["ts"] >= 0 and event["dur"] > 0
    return events


def tracks(events: Events) -> dict[str, Events]:
    """The complete events by the name of their track."""
    named = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len(set(named.values())) == len(named)
    found: dict[str, Events] = {name: [] for name in named.values()}
    for event in events:
        if event["ph"] == "X":
            found[named[event["tid"]]].append(event)
    return found


def end(event: dict[str, Any]) -> int:
    return int(event["ts"] + event["dur"])


def check_nesting(events: Events) -> None:
    """Any two events of a track lie apart or one inside the other: viewers drop what does not."""
    open_: Events = []
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        while open_ and end(open_[-1]) <= event["ts"]:
            open_.pop()
        assert not open_ or end(event) <= end(open_[-1]), (event, open_[-1])
        open_.append(event)


@contextmanager
def traced(file: Path, *nodes: str) -> Iterator[tuple[Watch, float]]:
    """A Watch that traces to `file`, and when it began."""
    out = TraceFile(file)
    tracer = Tracer(out)
    tracer.expect(nodes)
    watch = Watch(tracer)
    yield watch, tracer._started
    watch.close()
    out.close()


def dispatch(
    at: float, sent: float, done: float, *nodes: tuple[str, float, float, float, float]
) -> DispatchTimes:
    """Milliseconds after `at`. nodes: name, sent, replied, and how long queue and compute."""
    parts = [
        NodeTimes(n, at + s * MS, at + r * MS, round(q * 1000), round(c * 1000), 4160, 4136)
        for n, s, r, q, c in nodes
    ]
    times = at, at + (sent - 1) * MS, at + sent * MS, at + done * MS
    return DispatchTimes(3, 1, *times, tuple(parts))


def test_a_token(file: Path) -> None:
    """The driver's work, and each node's queue and compute inside its round trip."""
    with traced(file, "a", "b") as (watch, at):
        watch.dispatched(dispatch(at, 10, 20, ("b", 10, 20, 1, 5), ("a", 10, 14, 0, 2)))
        watch.chose(1, at + 2 * MS, at + 25 * MS, at + 26 * MS)
    found = tracks(read(file))
    assert set(found) == {"driver", "node a", "node b"}
    for events in found.values():
        check_nesting(events)
    shown = [(e["name"], round(e["ts"] / 1000), round(e["dur"] / 1000)) for e in found["driver"]]
    assert sorted(shown, key=lambda e: (e[1], -e[2])) == [
        ("token", 2, 24), ("attention", 2, 7), ("packing", 9, 1), ("waiting", 10, 10),
        ("attention", 20, 5), ("sampling", 25, 1),
    ]  # fmt: skip
    trip, queue, compute = found["node b"]
    assert (trip["name"], trip["args"]) == ("layer 3", {"out": 4160, "in": 4136})
    assert trip["ts"] <= queue["ts"] and end(queue) == compute["ts"] and end(compute) <= end(trip)
    assert [round(e["dur"] / 1000) for e in (trip, queue, compute)] == [10, 1, 5]


def test_dispatches_that_overlap(file: Path) -> None:
    """A node with several dispatches gets a track for each of them, and no more."""
    with traced(file) as (watch, at):
        for start in range(0, 60, 6):
            watch.dispatched(
                dispatch(at, start + 1, start + 11, ("a", start + 1, start + 11, 1, 3))
            )
        watch.chose(512, at, at + 90 * MS, at + 91 * MS)
    found = tracks(read(file))
    assert set(found) == {"driver", "node a", "node a (2)"}
    for events in found.values():
        check_nesting(events)
    assert sum(e["name"] == "layer 3" for events in found.values() for e in events) == 10
    assert [e["name"] for e in found["driver"]].count("prompt") == 1


def test_a_pass_that_broke_off(file: Path) -> None:
    """What was dispatched is there, though no token came of it."""
    with traced(file) as (watch, at):
        watch.dispatched(dispatch(at, 2, 9, ("a", 2, 9, 1, 3)))
    assert [e["name"] for e in tracks(read(file))["node a"]] == ["layer 3", "queue", "compute"]


def test_it_is_valid_after_each_write(file: Path) -> None:
    """Memory is bounded, and a process that is killed leaves an array that can be read."""
    out = TraceFile(file)
    assert json.loads(file.read_text()) == []
    event = '{"name":"' + "x" * 100 + '"}'
    seen = set()
    for _ in range(3 * trace.KEPT // len(event)):
        out.add(event)
        assert len(out._chunk[1]) < trace.KEPT
        seen.add(len(json.loads(file.read_text())))
    out.close()
    assert len(json.loads(file.read_text())) == 3 * trace.KEPT // len(event)
    assert len(seen) >= 3


@pytest.mark.parametrize("interrupted", range(6))
def test_an_interrupt_in_a_write(
    file: Path, interrupted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C before, in the middle of or after a write neither loses nor doubles an event."""
    real, calls = os.pwrite, 0

    def pwrite(descriptor: int, data: bytes, at: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 1 + interrupted // 2:
            if interrupted % 2:
                real(descriptor, data[: len(data) // 2], at)
            raise KeyboardInterrupt
        return real(descriptor, data[:1000], at)

    out = TraceFile(file)
    monkeypatch.setattr(os, "pwrite", pwrite)
    count, stopped = 0, False
    for number in range(12000):
        count += 1
        try:
            out.add(f'{{"number":{number}}}')
        except KeyboardInterrupt:
            stopped = True
    out.close()
    assert stopped
    assert [e["number"] for e in json.loads(file.read_text())] == list(range(count))


def test_a_full_disk(file: Path) -> None:
    """What there was room for is valid, and the sentence comes at the end."""
    out = TraceFile(file)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        for _ in range(20000):
            out.add('{"name":"x"}')
        with pytest.raises(InputError, match=f"{file}.*cannot be written .*too large.*--trace"):
            out.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert len(json.loads(file.read_text())) > 1000


@pytest.mark.parametrize("what", ["folder", "nowhere", "pipe"])
def test_files_that_cannot_be_written(tmp_path: Path, what: str) -> None:
    """A file that cannot be one is refused in a sentence, before anything is loaded."""
    path = tmp_path / what
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    else:
        path = path / "trace.json"
    with pytest.raises(InputError, match="--trace"):
        TraceFile(path)


def network() -> Any:
    """As much of a network as is watched."""
    figures = SimpleNamespace(nodes=[SimpleNamespace(name="b"), SimpleNamespace(name="a")])
    return SimpleNamespace(observer=None, figures=figures)


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, InputError])
def test_watching(file: Path, error: type[BaseException] | None) -> None:
    """Whatever ends it, the file is complete, nothing is watched any more, and errors go on."""
    engine, nodes = SimpleNamespace(watch=None), network()

    def run() -> None:
        with tracing(file) as out, watching(engine, nodes, out) as watch:
            assert engine.watch is watch
            nodes.observer(dispatch(perf_counter(), 2, 9, ("a", 2, 9, 1, 3)))
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(error):
            run()
    assert engine.watch is None and nodes.observer is None
    assert "layer 3" in [event["name"] for event in read(file)]


def test_watching_without_a_network(file: Path) -> None:
    """A one-process run has one track: the driver's."""
    with tracing(file) as out, watching(SimpleNamespace(watch=None), None, out) as watch:
        at = perf_counter()
        watch.chose(5, at, at + 1, at + 2)
    assert set(tracks(read(file))) == {"driver"}

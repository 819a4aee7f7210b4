"""Put measurements into docs/performance.md: `python -m tests.bench.document [FOLDER]`.

FOLDER holds what the other programs of tests/bench print, as NAME.json. They are copied to
docs/measurements; the page's parts between `<!-- NAME -->` and `<!-- end -->` are written anew, and
the pictures drawn. Without FOLDER the page is made again from what stands in docs/measurements.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from expert_driver.bench.report import number
from tests.bench.plot import Chart, Point, picture

DOCS = Path(__file__).parents[2] / "docs"
Result = dict[str, Any]

_PART = r"(<!-- {} -->\n)(?:.*?)(<!-- end -->)"


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown; all columns but the first are aligned to the right."""
    lines = [headers, ["---", *["--:"] * (len(headers) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def spread(one: Result) -> str:
    """A median with what it lies between: "35.1 (34.0 to 36.2)"."""
    return f"{number(one['median'])} ({number(one['least'])} to {number(one['most'])})"


def where(result: Result) -> str:
    """The conditions, in a sentence."""
    found = result["conditions"]
    versions = ", ".join(f"{name} {version}" for name, version in found["packages"].items())
    peer = f"; llama.cpp {found['llama.cpp']}" if "llama.cpp" in found else ""
    return (
        f"{found['cpu']}, {found['cores']} cores; {found['system']}; Python {found['python']}, "
        f"{versions}{peer}; load {found['load']} before and {found['load_after']} after; "
        f"{found['date'][:10]}.\n"
    )


# --- the parts


def peers_part(result: Result) -> str:
    """Speeds of everyone, then the ratios that are claimed."""
    asked = result["load"]
    who = list(dict.fromkeys(one["variant"] for one in result["measurements"]))
    found = {(one["what"], one["variant"]): one for one in result["measurements"]}
    whats = sorted({what for what, _ in found}, key=lambda what: (len(what), what))
    speeds = [
        [name, *(spread(found[what, name]) if (what, name) in found else "" for what in whats)]
        for name in who
    ]
    claims = [
        [
            f"{claim['what']}: {claim['who']} / {claim['base']}",
            *(spread(claim["ratio"]), number(claim["least"]), number(claim["goal"])),
        ]
        for claim in result["claims"]
    ]
    return (
        f"Tokens per second, median (least to most) of {asked['rounds']} rounds; "
        f"{asked['threads']} threads; decode: {asked['tokens']} tokens after {asked['context']}."
        "\n\n"
        + table(["", *whats], speeds)
        + "\n"
        + table(["ratio within a round", "median", "at least", "goal"], claims)
        + f"\n{where(result)}"
    )


def pair_part(result: Result) -> str:
    """Speeds of both, and their ratio turn by turn."""
    asked, found = result["load"], result["measurements"]
    rows = [
        [one["what"], *(spread(two) for two in found if two["what"] == one["what"]), spread(one)]
        for one in result["ratios"]
    ]
    who = list(dict.fromkeys(one["variant"] for one in found))
    return (
        f"Tokens per second, median (least to most) of {asked['rounds']} turns; "
        f"{asked['threads']} threads; decode: {asked['tokens']} tokens after {asked['context']}."
        "\n\n" + table(["", *who, result["ratios"][0]["variant"]], rows) + f"\n{where(result)}"
    )


def growth_part(result: Result) -> str:
    """A row for each point that was measured."""
    found: dict[tuple[str, str], dict[str, Result]] = {}
    for one in result["measurements"]:
        found.setdefault((one["what"], one["at"]), {})[one["variant"]] = one
    names = {
        "nodes": "nodes",
        "context": "tokens of context",
        "rows": "rows of a prompt",
        "delay": "ms one way",
    }
    columns = ("measured", "attention", "round_trip", "compute", "predicted")
    rows = [
        [
            f"{at} {names[what]}",
            *(spread(one[name]) if name == "measured" else _median(one, name) for name in columns),
            *(_median(one, name) for name in ("measured / predicted", "traffic")),
        ]
        for (what, at), one in found.items()
    ]
    headers = ("", "ms", "attention", "round trip", "compute", "model", "ms / model", "KB a token")
    return table(headers, rows) + f"\n{where(result)}"


def _median(found: dict[str, Result], name: str) -> str:
    return number(found[name]["median"]) if name in found else ""


def bench_part(result: Result) -> str:
    """What `expert-net bench` measured."""
    rows = [
        [f"{one['what']}, {one['at']}", spread(one), one["unit"]] for one in result["measurements"]
    ]
    return table(("", "median (least to most)", ""), rows) + f"\n{where(result)}"


def kernels_part(result: Result) -> str:
    """Each precision on one thread and on all, beside the line of memory."""

    def cells(run: Result, part: str, name: str) -> str:
        one = run[part][name]
        return f"{number(one['median'])} ({number(one['low'])} to {number(one['high'])})"

    rows = []
    for run in result["results"]:
        threads = f"{run['threads']} thread{'s' if run['threads'] > 1 else ''}"
        rows.append([f"memory, {threads}", cells(run, "decode_GBps", "line"), "1", ""])
        for name in ("int8", "f32"):
            figures = ("decode_GBps", "of_line", "prefill_GFLOPS")
            rows.append([f"{name}, {threads}", *(cells(run, part, name) for part in figures)])
    headers = (f"kernels: {result['isa']}", "1 row: GB/s", "of memory's", "512 rows: GFLOP/s")
    return table(headers, rows) + f"\n{where(result)}"


def dispatch_part(result: Result) -> str:
    """Our dispatch beside a bare fan-out of the same bytes, for each number of nodes."""
    rows = [
        [
            f"{run['nodes']} nodes",
            *(f"{run['bare'][name]:.0f}" for name in ("p50_us", "p99_us")),
            *(f"{run['dispatch'][name]:.0f}" for name in ("p50_us", "p99_us")),
            f"{run['dispatch']['ratio']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        ]
        for run in result["runs"]
        for ratios in [run["dispatch"]["ratio_of_runs"]]
    ]
    headers = ("us", "bare p50", "bare p99", "dispatch p50", "dispatch p99", "ratio of p50")
    return table(headers, rows) + f"\n{where(result)}"


PARTS: dict[str, Callable[[Result], str]] = {
    "expert-network-peers": peers_part,
    "expert-network-pair": pair_part,
    "expert-network-growth": growth_part,
    "expert-network-bench": bench_part,
    "expert-network-kernels": kernels_part,
    "expert-network-dispatch": dispatch_part,
}


# --- the pictures


def growth_picture(result: Result) -> str:
    """Token time by nodes, context and delay, and a prompt's time by its rows."""
    charts = []
    for what, title, x in (
        ("nodes", "Nodes on one machine", "nodes"),
        ("context", "Context", "tokens read before"),
        ("delay", "Slow network", "ms of delay added each way"),
        ("rows", "Prompt", "rows in one pass"),
    ):
        some = [one for one in result["measurements"] if one["what"] == what]
        marks = sorted({one["at"] for one in some}, key=float)
        names = ("measured",) if what == "rows" else ("measured", "predicted", "attention")
        lines = {
            {"predicted": "model"}.get(name, name): [_point(some, at, name) for at in marks]
            for name in names
        }
        unit = "ms" if what == "rows" else "ms per token"
        charts.append(Chart(title, x, unit, marks, lines))
    return picture(charts, "How the time of a token grows with nodes, context, delay and rows")


def peers_picture(results: Sequence[Result]) -> str:
    """Decoding and reading, for each shape and contender."""
    charts = []
    for result in results:
        some = result["measurements"]
        who = [name for name in dict.fromkeys(one["variant"] for one in some) if name != "mlx-lm"]
        prompt = f"prefill {max(result['load']['prompts'])}"
        for what in ("decode", prompt):
            points = {
                name: [_point([one for one in some if one["what"] == what], "", name)]
                for name in who
            }
            title = f"{result['shape']['name']}: {what}"
            charts.append(Chart(title, "", "tokens per second", [""], points, bars=True))
    charts = [chart for chart in charts if chart.points]
    return picture(charts, "Tokens per second of this project and of llama.cpp")


def _point(some: Sequence[Result], at: str, variant: str) -> Point | None:
    for one in some:
        if (one["at"], one["variant"]) == (at, variant):
            return Point(one["median"], one["least"], one["most"])
    return None


# --- the page


def fill(page: str, name: str, text: str) -> str:
    """`page` with the part called `name` replaced. Raises KeyError if there is none."""
    pattern = re.compile(_PART.format(re.escape(name)), re.DOTALL)
    if not pattern.search(page):
        raise KeyError(name)
    return pattern.sub(lambda found: f"{found[1]}\n{text}\n{found[2]}", page)


def make(docs: Path) -> None:
    """Fill docs/performance.md and draw its pictures from docs/measurements."""
    results: dict[str, Result] = {
        file.stem: json.loads(file.read_text())
        for file in sorted((docs / "measurements").glob("*"))
    }
    file = docs / "performance.md"
    page = file.read_text(encoding="utf-8")
    for name, result in results.items():
        page = fill(page, name, PARTS[result["format"]](result))
    file.write_text(page, encoding="utf-8")
    peers = [one for one in results.values() if one["format"] == "expert-network-peers"]
    growth = [one for one in results.values() if one["format"] == "expert-network-growth"]
    if peers:
        (docs / "images" / "peers.svg").write_text(peers_picture(peers))
    if growth:
        (docs / "images" / "growth.svg").write_text(growth_picture(growth[0]))


def main() -> None:
    """The command line of this file."""
    for folder in map(Path, sys.argv[1:2]):
        (DOCS / "measurements").mkdir(exist_ok=True)
        for file in folder.glob("*.json"):
            text = json.dumps(json.loads(file.read_text()), indent=1)
            (DOCS / "measurements" / file.name).write_text(text + "\n")
    make(DOCS)


if __name__ == "__main__":
    main()

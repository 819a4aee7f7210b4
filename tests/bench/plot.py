"""Charts as SVG, from numbers alone: readable on a light page and on a dark one.

Colours come from a style sheet in the file that asks what the reader prefers, and lines differ in
their marks too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from expert_driver.bench.report import number

WIDTH, HEIGHT, GAP = 400, 260, 16
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 58, 44
_ROUND_STEPS = (1, 2, 2.5, 5, 10)

_STYLE = """
text{font:12px ui-sans-serif,system-ui,Helvetica,Arial,sans-serif;fill:#1f2937}
.title{font-size:14px;font-weight:700}.small{font-size:11px}
.panel{fill:#fff;stroke:#d1d5db}.grid{stroke:#e5e7eb}.axis{stroke:#6b7280}
.l0{stroke:#1d4ed8;fill:#1d4ed8}.l1{stroke:#c2410c;fill:#c2410c}
.l2{stroke:#047857;fill:#047857}.l3{stroke:#7e22ce;fill:#7e22ce}.l4{stroke:#64748b;fill:#64748b}
path{fill:none!important;stroke-width:2}.range{stroke-width:1.5}
@media(prefers-color-scheme:dark){
text{fill:#e5e7eb}.panel{fill:#111827;stroke:#374151}.grid{stroke:#374151}.axis{stroke:#9ca3af}
.l0{stroke:#93c5fd;fill:#93c5fd}.l1{stroke:#fdba74;fill:#fdba74}
.l2{stroke:#6ee7b7;fill:#6ee7b7}.l3{stroke:#d8b4fe;fill:#d8b4fe}.l4{stroke:#94a3b8;fill:#94a3b8}}
"""


@dataclass(frozen=True)
class Point:
    """A median and the range around it."""

    value: float
    least: float
    most: float


@dataclass(frozen=True)
class Chart:
    """`lines` have a point for each of the marks along x, or None; as bars if `bars`."""

    title: str
    x: str
    unit: str
    marks: Sequence[str]
    lines: Mapping[str, Sequence[Point | None]]
    bars: bool = False

    @property
    def points(self) -> list[Point]:
        return [point for line in self.lines.values() for point in line if point is not None]


def picture(charts: Sequence[Chart], label: str) -> str:
    """The charts, two in a row, as one SVG file; `label` is for who cannot see it."""
    rows = -(-len(charts) // 2)
    columns = min(2, len(charts))
    width = columns * WIDTH + (columns + 1) * GAP
    height = rows * HEIGHT + (rows + 1) * GAP
    drawn = [
        f'<g transform="translate({GAP + n % 2 * (WIDTH + GAP)},{GAP + n // 2 * (HEIGHT + GAP)})">'
        f"{_chart(chart)}</g>"
        for n, chart in enumerate(charts)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(label)}"><style>{_STYLE}</style>\n' + "\n".join(drawn) + "\n</svg>\n"
    )


def _chart(chart: Chart) -> str:
    top, step = scale(max(point.most for point in chart.points))
    parts = [
        f'<rect class="panel" width="{WIDTH}" height="{HEIGHT}" rx="8"/>',
        _text(14, 22, chart.title, "title"),
        _text(WIDTH / 2 + 20, HEIGHT - 8, chart.x, "small", "middle"),
        _text(WIDTH - _RIGHT, 22, chart.unit, "small", "end"),
    ]
    for n in range(round(top / step) + 1):
        y = _y(n * step, top)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{n * step:g}", "small", "end"))
    for n, mark in enumerate(chart.marks):
        parts.append(_text(_x(n, chart), HEIGHT - 26, mark, "small", "middle"))
    draw = _bars if chart.bars else _line
    place = 14.0
    for nth, (name, line) in enumerate(chart.lines.items()):
        parts.append(draw(chart, line, nth, top))
        parts.append(f'<circle class="l{nth}" cx="{place + 4:.0f}" cy="39" r="4"/>')
        parts.append(_text(place + 12, 43, name, "small"))
        place += 24 + 6.2 * len(name)
    parts.append(f'<path class="axis" d="M{_LEFT} {_y(0, top):.1f}H{WIDTH - _RIGHT}"/>')
    return "".join(parts)


def _line(chart: Chart, line: Sequence[Point | None], nth: int, top: float) -> str:
    there = [(_x(n, chart), point) for n, point in enumerate(line) if point is not None]
    path = "L".join(f"{x:.1f} {_y(point.value, top):.1f}" for x, point in there)
    dash = ' stroke-dasharray="5 4"' if nth == 1 else ""
    marks = "".join(
        _range(x, point, nth, top)
        + f'<circle class="l{nth}" cx="{x:.1f}" cy="{_y(point.value, top):.1f}" r="3.5"/>'
        for x, point in there
    )
    return f'<path class="l{nth}"{dash} d="M{path}"/>{marks}'


def _bars(chart: Chart, line: Sequence[Point | None], nth: int, top: float) -> str:
    count = len(chart.lines)
    room = (WIDTH - _LEFT - _RIGHT) / len(chart.marks)
    width = min(56.0, room * 0.8 / count)
    drawn = []
    for n, point in enumerate(line):
        if point is None:
            continue
        x = _x(n, chart) + (nth - (count - 1) / 2) * width
        y = _y(point.value, top)
        drawn.append(
            f'<rect class="l{nth}" x="{x - width * 0.45:.1f}" y="{y:.1f}" '
            f'width="{width * 0.9:.1f}" height="{_y(0, top) - y:.1f}" fill-opacity=".55"/>'
            + _range(x, point, nth, top)
            + _text(x, _y(point.most, top) - 4, number(point.value), "small", "middle")
        )
    return "".join(drawn)


def _range(x: float, point: Point, nth: int, top: float) -> str:
    low, high = _y(point.least, top), _y(point.most, top)
    return f'<path class="l{nth} range" d="M{x:.1f} {low:.1f}V{high:.1f}"/>'


def scale(most: float) -> tuple[float, float]:
    """The end of an axis from 0 that shows `most`, and the step between its four to six lines."""
    power = 10.0
    while power > most / 4:
        power /= 10
    while power * 10 <= most / 4:
        power *= 10
    step = next(power * factor for factor in _ROUND_STEPS if power * factor * 5 >= most)
    return step * (int(most / step - 1e-9) + 1), step


def _x(n: int, chart: Chart) -> float:
    return _LEFT + (n + 0.5) * (WIDTH - _LEFT - _RIGHT) / len(chart.marks)


def _y(value: float, top: float) -> float:
    return HEIGHT - _BOTTOM - value / top * (HEIGHT - _TOP - _BOTTOM)


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )

"""What measurements become on the page: parts that can be written again, and pictures."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from expert_driver.bench.samples import Samples
from tests.bench.document import DOCS, PARTS, fill, make
from tests.bench.plot import Chart, Point, picture, scale

SVG = "{http://www.w3.org/2000/svg}"
CONDITIONS = {
    "cpu": "a processor",
    "cores": 2,
    "system": "Linux",
    "python": "3.12.0",
    "packages": {"mlx": "1"},
    "load": 0.1,
    "load_after": 1.9,
    "date": "2030-01-02T03:04:05+00:00",
}


def peers() -> dict[str, Any]:
    """A result like those of tests/bench/peers.py."""
    samples = Samples()
    for one, other in ((34.0, 26.0), (36.0, 24.0), (35.0, 25.0)):
        samples.add("decode", "", "tok/s", "one process", one)
        samples.add("decode", "", "tok/s", "llama.cpp", other)
    return {
        "format": "expert-network-peers",
        "shape": {"name": "olmoe"},
        "load": {"rounds": 3, "threads": 2, "tokens": 32, "context": 128, "prompts": [512]},
        "conditions": CONDITIONS,
        "measurements": [series.as_json() for series in samples.series],
        "claims": [],
    }


def test_a_part_is_written_in_its_place() -> None:
    """Only what stands between the marks of that name is replaced, as often as one likes."""
    page = "a\n<!-- x -->\nold\n<!-- end -->\nb\n<!-- y -->\n<!-- end -->\n"
    once = fill(page, "x", r"new \1")
    assert once == "a\n<!-- x -->\n\nnew \\1\n<!-- end -->\nb\n<!-- y -->\n<!-- end -->\n"
    assert fill(once, "x", r"new \1") == once
    with pytest.raises(KeyError):
        fill(page, "z", "")


def test_a_page_is_made_from_measurements(tmp_path: Path) -> None:
    """Tables and conditions come onto the page, and the picture is drawn."""
    for folder in ("measurements", "images"):
        (tmp_path / folder).mkdir()
    (tmp_path / "measurements" / "peers-olmoe.json").write_text(json.dumps(peers()))
    (tmp_path / "performance.md").write_text("<!-- peers-olmoe -->\n<!-- end -->\n")
    make(tmp_path)
    page = (tmp_path / "performance.md").read_text()
    assert "| one process | 35.0 (34.0 to 36.0) |" in page
    assert "load 0.1 before and 1.9 after; 2030-01-02" in page
    drawn = ElementTree.parse(tmp_path / "images" / "peers.svg").getroot()
    bars = [rect for rect in drawn.iter(f"{SVG}rect") if rect.get("class") != "panel"]
    heights = [float(rect.get("height", 0)) for rect in bars if rect.get("class") in ("l0", "l1")]
    assert heights[0] / heights[1] == pytest.approx(35 / 25, rel=0.01)


def test_the_page_is_made_from_what_is_committed() -> None:
    """docs/performance.md holds what docs/measurements says, and a place for each of its files."""
    page = (DOCS / "performance.md").read_text(encoding="utf-8")
    for file in (DOCS / "measurements").glob("*.json"):
        result = json.loads(file.read_text())
        assert fill(page, file.stem, PARTS[result["format"]](result)) == page, file.name


def test_a_chart_shows_what_it_is_given() -> None:
    """A line goes through its medians, over the marks that have one; colours follow the page."""
    line = [Point(10, 9, 11), None, Point(20, 18, 22)]
    text = picture([Chart("Title <&>", "x", "ms", ["1", "2", "4"], {"measured": line})], "label")
    drawn = ElementTree.fromstring(text)
    dots = [dot for dot in drawn.iter(f"{SVG}circle") if dot.get("r") == "3.5"]
    assert len(dots) == 2
    assert float(dots[0].get("cy", 0)) > float(dots[1].get("cy", 0))
    assert "prefers-color-scheme:dark" in text


@pytest.mark.parametrize("most", [0.013, 0.9, 1.0, 7.3, 26.4, 99.0, 1234.0])
def test_an_axis_holds_its_values(most: float) -> None:
    """It ends at or above the largest value, in two to six round steps."""
    top, step = scale(most)
    assert top >= most > top - step
    assert 2 <= round(top / step) <= 6

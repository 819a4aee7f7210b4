"""The catalog: its figures are those of the architectures, and both its tables show them."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from expert_driver import catalog
from expert_driver.cli import main
from expert_driver.commands.models import lines
from tests.support.model_figures import CONFIGS, figures

ARCHITECTURES = json.loads(CONFIGS.read_text())

# What the makers publish, in billions: total and active where they say both.
PUBLISHED = {
    "OLMoE-1B-7B": (6.9, 1.3),
    "Qwen3-30B-A3B": (30.5, 3.3),
    "Qwen3-235B-A22B": (235, 22),
    "Qwen3-Next-80B-A3B": (80, 3.9),
    "Gemma-4-26B-A4B": (25.2, 3.8),
    "GLM-4.5-Air": (106, None),
    "gpt-oss-20b": (20.9, None),
    "gpt-oss-120b": (116.8, None),
    "Mixtral-8x7B": (46.7, 12.9),
    "Qwen3.5-122B-A10B": (122, 10),
    "Qwen3.5-35B-A3B": (35, 3),
}


def test_every_entry_has_an_architecture() -> None:
    """No figure stands in the catalog that is not computed."""
    assert {entry.name for entry in catalog.load()} == set(ARCHITECTURES)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_the_figures_are_computed(name: str) -> None:
    """Each entry says what mlx-lm's own model of that architecture adds up to."""
    entry = catalog.find(name)
    assert entry is not None
    expected = figures(ARCHITECTURES[name])
    assert {key: asdict(entry)[key] for key in expected} == expected


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_the_figures_agree_with_the_makers(name: str) -> None:
    """The parameters are, within a few parts in a hundred, those that the maker publishes."""
    entry = catalog.find(name)
    total, active = PUBLISHED[name]
    assert entry is not None
    assert entry.total_params == pytest.approx(total * 1e9, rel=0.02)
    # Some makers leave the embeddings out of what is active.
    assert active is None or entry.active_params == pytest.approx(active * 1e9, rel=0.16)


def test_names_are_found_in_any_case() -> None:
    """Nobody has to remember the capitals; another name is not found."""
    entry = catalog.find("OLMOE-1b-7b")
    assert entry is not None
    assert entry.name == "OLMoE-1B-7B"
    assert catalog.find("OLMoE") is None


def test_the_smallest_comes_first() -> None:
    """The list begins with what fits anywhere."""
    sizes = [entry.disk_bytes for entry in catalog.load()]
    assert sizes == sorted(sizes)
    assert all(entry.trunk_bytes < entry.disk_bytes / 3 for entry in catalog.load())


@pytest.mark.parametrize("words", [["models"], ["download", "list"]])
def test_the_table(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """`models` and `download list` print the same table, no wider than a terminal."""
    assert main(words) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1:3] == [
        "OLMoE-1B-7B             6.9B    1.3B    3.9 GB  268.3 MB   1,024    3.5 MB",
        "  mlx-community/OLMoE-1B-7B-0125-Instruct-4bit",
    ]
    assert all(len(line) <= 80 for line in out)
    assert len(out) == 1 + 2 * len(catalog.load())


def test_a_note_is_shown() -> None:
    """What is experimental is said to be so."""
    entry = catalog.find("Gemma-4-26B-A4B")
    assert entry is not None
    assert "(experimental, text only)" in lines(entry)[1]


def test_the_same_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """--json gives every field, sizes in bytes."""
    assert main(["models", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert entries[0]["trunk_bytes"] == 268_341_248
    assert entries[0]["blocks"] == 1024
    assert len(entries) == len(catalog.load())

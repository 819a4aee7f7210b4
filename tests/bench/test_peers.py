"""The measurement against peers: its order, its ratios, and twins of one size."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from expert_network.progress import silent
from expert_network.store.reader import Store
from tests.bench.contenders import Load, Sample
from tests.bench.gguf_twin import nbytes, tensors
from tests.bench.models import make_store
from tests.bench.peers import CLAIMS, LLAMA, ONE, claimed, measure
from tests.bench.shapes import SHAPES

LOAD = Load(8, 2, (32, 512), 1)


@dataclass
class Scripted:
    """A contender that takes its speeds from a list and writes down that it ran."""

    name: str
    speeds: list[float]
    ran: list[str] = field(default_factory=list)

    def sample(self, load: Load) -> Sample:
        self.ran.append(self.name)
        return {"decode": self.speeds.pop(0), "prefill 512": 1.0}


def test_contenders_take_turns() -> None:
    """Who is first in a round is last in the next, and ratios are taken within rounds."""
    ran: list[str] = []
    everyone = [Scripted(ONE, [30.0, 3.0, 33.0], ran), Scripted(LLAMA, [20.0, 2.0, 20.0], ran)]
    samples = measure(everyone, LOAD, 3, silent)
    assert ran == [ONE, LLAMA, LLAMA, ONE, ONE, LLAMA]
    decode, prompt = claimed(samples.series, 512, CLAIMS)
    assert (decode["what"], decode["who"], decode["base"]) == ("decode", ONE, LLAMA)
    assert decode["ratio"]["samples"] == pytest.approx([1.5, 1.5, 1.65])
    assert (prompt["what"], prompt["ratio"]["median"]) == ("prefill 512", 1.0)


def test_twins_take_the_same_room(tmp_path: Path) -> None:
    """The GGUF twin's experts have as many bytes as the store's, and all of it 5 % more or less."""
    shape = SHAPES["tiny"]
    manifest = Store.open(make_store(shape, tmp_path)).manifest
    twin = {name: nbytes(name, extents) for name, extents in tensors(shape)}
    experts = sum(size for name, size in twin.items() if "exps" in name)
    assert experts == manifest.block_bytes
    trunk = manifest.files["trunk.safetensors"].size
    assert sum(twin.values()) - experts == pytest.approx(trunk, rel=0.05)

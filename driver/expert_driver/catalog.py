"""The models that are known by name, with what they take on disk and in memory: catalog.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class Entry:
    """One model as `expert-net download NAME` stores it. Sizes in bytes, parameters in numbers.

    `repo` is where it comes from, `experts` how many each of the `layers` MoE layers has, of which
    `per_token` are active. `active_params` are the trunk's and the active experts'. `disk_bytes` is
    the whole store's, padding included.
    """

    name: str
    repo: str
    model_type: str
    total_params: int
    active_params: int
    layers: int
    experts: int
    per_token: int
    block_bytes: int
    trunk_bytes: int
    disk_bytes: int
    bits: str
    note: str = ""

    @property
    def blocks(self) -> int:
        """How many blocks the model has."""
        return self.layers * self.experts


@cache
def load() -> tuple[Entry, ...]:
    """All entries, from the smallest to the largest."""
    text = (files("expert_driver") / "catalog.toml").read_text(encoding="utf-8")
    entries = [Entry(**item) for item in tomllib.loads(text)["model"]]
    return tuple(sorted(entries, key=lambda entry: entry.disk_bytes))


def find(name: str) -> Entry | None:
    """The entry of this name, in whatever case."""
    return next((entry for entry in load() if entry.name.lower() == name.lower()), None)

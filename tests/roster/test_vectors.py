"""The tables of docs/roster.md against the code and the twin."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from expert_roster.rendezvous import block_hashes, mix64, name_hash, owner_order, scores
from expert_roster.roster import Roster
from tests.roster import twin

DOC = (Path(__file__).parents[2] / "docs" / "roster.md").read_text("utf-8")


def table(title: str) -> list[list[str]]:
    """The cells of the table below the heading `title`, without its two head lines."""
    section = DOC.split(f"\n### {title}\n")[1].split("\n#")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert len(rows) >= 3
    return rows


def u64(*values: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(values, np.uint64)


@pytest.mark.parametrize("source, mixed", table("Mixer"))
def test_mixer(source: str, mixed: str) -> None:
    """The mixer gives the documented 64 bits."""
    assert f"{int(mix64(u64(int(source, 16)))[0]):016x}" == mixed
    assert f"{twin.mix(int(source, 16)):016x}" == mixed


@pytest.mark.parametrize("name, hashed", table("Name hash"))
def test_name_hash(name: str, hashed: str) -> None:
    """A name hashes to the documented 64 bits."""
    assert f"{name_hash(name):016x}" == hashed


@pytest.mark.parametrize("layer, expert, hashed", table("Block hash"))
def test_block_hash(layer: str, expert: str, hashed: str) -> None:
    """A block hashes to the documented 64 bits."""
    blocks = block_hashes(np.array([int(layer)]), np.array([int(expert)]))
    assert f"{int(blocks[0]):016x}" == hashed


@pytest.mark.parametrize("name, weight, layer, expert, bits, h, score", table("Score"))
def test_score(
    name: str, weight: str, layer: str, expert: str, bits: str, h: str, score: str
) -> None:
    """Bits and h are the documented ones exactly; the score is good to 15 digits."""
    block = block_hashes(np.array([int(layer)]), np.array([int(expert)]))
    mixed = mix64(block ^ u64(name_hash(name)))
    assert f"{int(mixed[0]):016x}" == bits
    assert ((int(bits, 16) >> 12) + 0.5) / 2**52 == float(h)
    (ours,) = scores(u64(name_hash(name)), np.array([float(weight)]), block)[0]
    assert math.isclose(ours, float(score), rel_tol=1e-15)
    theirs = twin.score(name, float(weight), int(layer), int(expert))
    assert math.isclose(theirs, float(score), rel_tol=1e-15)


@pytest.mark.parametrize("spec, layer, expert, order", table("Owner order"))
def test_owner_order(spec: str, layer: str, expert: str, order: str) -> None:
    """The owner order is the documented one."""
    roster = Roster.parse(spec)
    (row,) = owner_order(roster, int(layer), np.array([int(expert)]))
    assert [roster.names[index] for index in row] == order.split()


@pytest.mark.parametrize("spec, replicas, digest", table("Digest"))
def test_digest(spec: str, replicas: str, digest: str) -> None:
    """The digest is the documented one."""
    assert Roster.parse(spec, int(replicas)).digest == digest


def test_canonical_bytes() -> None:
    """The bytes shown on the page are those that are hashed."""
    shown = re.search(r"```text\n(expert-roster 1\n.*?)```", DOC, re.DOTALL)
    assert shown is not None
    assert Roster.parse("b=16,a=64", replicas=2).canonical == shown[1].encode()


def test_documented_toml_is_read() -> None:
    """The TOML on the page is a roster."""
    shown = re.search(r"```toml\n(.*?)```", DOC, re.DOTALL)
    assert shown is not None
    roster = Roster.from_toml(shown[1])
    assert roster == Roster((("a", 64), ("b", 16), ("studio.local", 192)), replicas=2, epoch=3)

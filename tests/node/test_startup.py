"""expert_node.startup: what can be said against a node before it loads anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from expert_network.errors import OutOfMemory, RosterError, StoreError
from expert_node.config import NodeConfig
from expert_node.startup import SERVING_BYTES, Startup, check_memory, read
from tests.support.stores import write_store

GB = 10**9


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home whose models folder holds one store, called tiny."""
    write_store(tmp_path / "models" / "tiny")
    return tmp_path


def config(home: Path, **changes: object) -> NodeConfig:
    values: dict[str, object] = {"roster": "a,b", "me": "a", "home": home}
    return NodeConfig(**(values | changes))  # type: ignore[arg-type]


def test_the_only_store_is_taken(home: Path) -> None:
    """Without --store the one store of the models folder is meant; with it, one by name or path."""
    assert read(config(home)).store.path == home / "models" / "tiny"
    assert read(config(home, store="tiny")).store.path == home / "models" / "tiny"
    path = str(home / "models" / "tiny")
    assert read(config(home, store=path)).store.path == Path(path)


def test_no_store(tmp_path: Path) -> None:
    """With no store anywhere the models folder is named."""
    with pytest.raises(StoreError, match="no store stands here"):
        read(config(tmp_path))


def test_several_stores(home: Path) -> None:
    """With several stores they are listed, and one has to be named."""
    write_store(home / "models" / "other")
    with pytest.raises(StoreError, match="other, tiny"):
        read(config(home))


def test_me_is_not_in_the_roster(home: Path) -> None:
    """A node that the roster does not name is told who is in it."""
    with pytest.raises(RosterError, match="'c' is not in the roster, which names a, b"):
        read(config(home, me="c"))


def test_partitions_cover_the_model(home: Path) -> None:
    """The nodes of a roster own every block between them; with replicas, each one twice."""
    for replicas in (1, 2):
        counts = [read(config(home, me=name, replicas=replicas)).block_count for name in ("a", "b")]
        assert sum(counts) == 6 * replicas


def test_roster_file(home: Path) -> None:
    """A roster may stand in a TOML file; --replicas wins over what it says."""
    file = home / "roster.toml"
    file.write_text("replicas = 2\nepoch = 5\n[nodes]\na = 1\nb = 3\n")
    settled = read(config(home, roster=str(file)))
    assert (settled.roster.replicas, settled.roster.epoch) == (2, 5)
    assert read(config(home, roster=str(file), replicas=1)).roster.replicas == 1


@pytest.fixture
def settled(home: Path) -> Startup:
    """Node a of a,b, ready to be checked."""
    return read(config(home))


def test_memory_that_suffices(settled: Startup) -> None:
    """A partition that fits beside what serving takes passes."""
    check_memory(settled, 8 * GB, 8 * GB + SERVING_BYTES)


def test_memory_shortfall(settled: Startup) -> None:
    """One that does not is refused with what it needs, what there is, the shortfall and advice."""
    with pytest.raises(OutOfMemory) as refusal:
        check_memory(settled, 8 * GB, 6 * GB)
    sentence = str(refusal.value)
    assert refusal.value.exit_code == 5
    for words in ("node a", "8.0 GB", "6.0 GB is available", "2.2 GB short", "smaller weight"):
        assert words in sentence


def test_a_node_without_blocks_fits_anywhere(settled: Startup) -> None:
    """Where nothing is to be loaded nothing is refused."""
    check_memory(settled, 0, 1000)

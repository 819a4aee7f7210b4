"""Names of stores and the folders they mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from expert_network import places
from expert_network.errors import StoreError


def make_store(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "manifest.json").write_text("{}")
    return path


def test_home_is_the_override(tmp_path: Path) -> None:
    """An explicit home wins over the user's data directory."""
    assert places.home(tmp_path) == tmp_path
    assert places.home(None).name == "expert-network"


def test_a_path_is_a_path(tmp_path: Path) -> None:
    """A path to a folder is that folder, whatever stands in the models folder."""
    store = make_store(tmp_path / "elsewhere" / "story")
    make_store(tmp_path / "models" / "story")
    assert places.find_store(str(store), tmp_path) == store


def test_a_name_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bare name is a store of the models folder, and `org/name` is one as well."""
    monkeypatch.chdir(tmp_path)
    named = make_store(tmp_path / "models" / "story")
    assert places.find_store("story", tmp_path) == named
    nested = make_store(tmp_path / "models" / "org" / "name")
    assert places.find_store("org/name", tmp_path) == nested


def test_the_current_folder_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store in the current folder hides a named one; another folder does not."""
    monkeypatch.chdir(tmp_path)
    named = make_store(tmp_path / "models" / "story")
    (tmp_path / "story").mkdir()
    assert places.find_store("story", tmp_path) == named
    (tmp_path / "story" / "manifest.json").write_text("{}")
    assert places.find_store("story", tmp_path) == Path("story")


def test_a_folder_that_is_no_store_is_left_to_the_reader(tmp_path: Path) -> None:
    """A folder without a manifest is returned: opening it tells what it lacks."""
    assert places.find_store(str(tmp_path), tmp_path) == tmp_path


def test_an_unknown_name_lists_what_there_is(tmp_path: Path) -> None:
    """The sentence for an unknown name lists the stores that could have been meant."""
    make_store(tmp_path / "models" / "story")
    make_store(tmp_path / "models" / "half.partial")
    with pytest.raises(StoreError, match=r"no such folder.*it has story"):
        places.find_store("stroy", tmp_path)


def test_a_file_is_not_a_store(tmp_path: Path) -> None:
    """A file in a store's place is refused as such."""
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(StoreError, match="a file"):
        places.find_store(str(tmp_path / "model.safetensors"), tmp_path)


def test_only_store_needs_exactly_one(tmp_path: Path) -> None:
    """Leaving the store out works when exactly one finished store stands in the models folder."""
    with pytest.raises(StoreError, match="no store stands here"):
        places.only_store(tmp_path)
    one = make_store(tmp_path / "models" / "one")
    make_store(tmp_path / "models" / "two.partial")
    assert places.only_store(tmp_path) == one
    make_store(tmp_path / "models" / "two")
    with pytest.raises(StoreError, match=r"several stores stand here \(one, two\)"):
        places.only_store(tmp_path)
